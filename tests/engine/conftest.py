"""Makes the sibling modules of the engine's tests importable, and the worlds of tests of tiers."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "tiers")]
