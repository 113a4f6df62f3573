"""Puts the folder's own helpers on the path: tests run with ``--import-mode=importlib``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def world():
    from tests_transfer_world import World

    world = World()
    yield world
    world.close()
