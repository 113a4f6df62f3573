"""Puts the folder on the path: some tests use the worlds of others beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
