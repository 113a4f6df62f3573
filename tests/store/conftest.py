"""Puts the folder's own helpers on the path: tests run with ``--import-mode=importlib``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
