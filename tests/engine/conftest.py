"""Makes the sibling modules of the engine's tests importable, and the worlds of tests of tiers."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "tiers"), str(HERE / "latents")]
