"""Goal: an instance that can answer nobody ends; one whose clients ask the impossible does not."""

import pytest

from tandem.core.errors import ConfigError
from tandem.core.wire import FinishReason, RequestOutput
from tandem.engine.process.self_test import MAX_FAILURES, NAME, NUM_TOKENS, SelfTest


class Engine:
    """Takes the test's request."""

    def __init__(self):
        self.requests, self.error = [], None

    def add(self, request):
        if self.error is not None:
            raise self.error
        self.requests.append(request)


@pytest.fixture
def engine():
    return Engine()


def end(name="r", code=None):
    reason = FinishReason.LENGTH if code is None else FinishReason.ERROR
    text = None if code is None else "the file is gone"
    return RequestOutput(
        request_id=name, token_ids=[], finish_reason=reason, error_code=code, error_text=text
    )


def test_an_engine_whose_own_request_fails_is_broken(engine):
    test = SelfTest(engine, 1000)
    failed = [end(code="corruption")] * MAX_FAILURES
    assert test.take(failed) == failed
    (request,) = engine.requests
    assert len(request.prompt_ids) == NUM_TOKENS
    assert max(request.prompt_ids) > 900
    assert request.sampling.needs_whole_prompt, "else a cached prefix would pass the test"
    assert not test.failure
    assert test.take([end(NAME, "corruption")]) == []
    assert test.failure == "the file is gone"


def test_failures_of_requests_alone_do_not_end_it(engine):
    test = SelfTest(engine, 4)
    for _ in range(5):
        test.take([end(code="internal")] * (MAX_FAILURES - 1) + [end()])
        test.take([end(code="config")] * 9)
    assert not engine.requests
    for _ in range(3):
        test.take([end(code="internal")] * MAX_FAILURES)
        assert test.take([end(NAME)]) == []
    assert [len(request.prompt_ids) for request in engine.requests] == [4] * 3
    engine.error = ConfigError("engine.add", "this model gives vectors")
    test.take([end(code="internal")] * MAX_FAILURES)
    assert not test.failure
