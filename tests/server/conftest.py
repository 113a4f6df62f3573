"""Makes the sibling modules of the server's tests importable, and starts servers in threads."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving import LiveServers
from vocabularies import make_byte_level_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_byte_level_tokenizer()


@pytest.fixture
def serve(tokenizer):
    """Start servers; at the end of the test they stop, and must hold nothing."""
    with LiveServers(tokenizer) as servers:
        yield servers.start


@pytest.fixture
def serve_text():
    """As ``serve``, without a chat template, whose process takes a moment to start."""
    with LiveServers(make_byte_level_tokenizer(chat_template=None)) as servers:
        yield servers.start


@pytest.fixture(scope="module")
def shared(tokenizer):
    """One server for tests that only read."""
    with LiveServers(tokenizer) as servers:
        yield servers.start()
