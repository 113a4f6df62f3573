"""Makes the sibling modules of the server's tests importable, and starts servers in threads."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine, make_info
from serving import KEYS, LiveServers, TalkingServer
from vocabularies import TOOL_TEMPLATE, make_byte_level_tokenizer


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


@pytest.fixture(scope="session")
def talking():
    """One server for the clients' tests, whose model says what a test tells it to."""
    tokenizer = make_byte_level_tokenizer(TOOL_TEMPLATE)
    with LiveServers(tokenizer) as servers:
        # Tools take more room than the fake engine's model has by itself.
        engine = FakeEngine(info=make_info(320, max_model_len=4096))
        yield TalkingServer(servers.start(engine, api_key=KEYS), tokenizer)


@pytest.fixture
def live(talking):
    """That server, which has forgotten what the tests before did."""
    talking.server.renew()
    talking.server.engine.stop_token_id = 0
    return talking.server


@pytest.fixture
def say(talking, live):
    """Have the model say a text, or call a tool; ``say.prompt()`` is what it was asked last."""
    return talking
