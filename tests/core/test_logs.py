"""Goal: log lines can be read by a person or a program, and no fault floods them."""

import json
import logging

import pytest

from tandem.core.logs import (
    MAX_REPEATS,
    REPEAT_WINDOW_S,
    _RepeatFilter,
    configure_logging,
    current_request_id,
)


@pytest.fixture
def root():
    """The root logger, as it was afterwards."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_json_lines_hold_what_text_holds(root, capsys):
    configure_logging("server", "info", "json")
    token = current_request_id.set("r1")
    try:
        logging.getLogger("a.b").info('event=x text="%s"', 'quote " and\nbreak')
        try:
            raise OSError("no space")
        except OSError:
            logging.getLogger("a.b").exception("event=failed")
        try:
            raise KeyError("k")
        except KeyError:
            logging.getLogger("a.b").exception("event=bug")
    finally:
        current_request_id.reset(token)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["info", "error", "error"]
    first = lines[0]
    assert (first["process"], first["logger"], first["request_id"]) == ("server", "a.b", "r1")
    assert first["message"] == 'event=x text="quote " and\nbreak"'
    assert lines[1]["error"] == "no space", "the world failed: no traceback"
    assert "KeyError" in lines[2]["traceback"]


def test_repeated_warnings_are_counted_instead_of_written():
    """As asyncio does for each connection that it has no descriptor for, thousands a second."""
    now_s = 0.0
    throttle = _RepeatFilter(lambda: now_s)

    def log(message, level=logging.ERROR, *arguments):
        record = logging.LogRecord("asyncio", level, "f", 1, message, arguments, None)
        return record.getMessage() if throttle.filter(record) else None

    about = "socket.accept() out of system resource\nsocket: <"
    written = [log(f"{about}{i}>") for i in range(5000)]
    assert sum(line is not None for line in written) == MAX_REPEATS
    assert log("another %s", logging.WARNING, 1) == "another 1"
    assert all(log("event=request", logging.INFO) for _ in range(100)), "not what is no fault"
    now_s = REPEAT_WINDOW_S
    assert log(f"{about}x>").endswith(f"suppressed={5000 - MAX_REPEATS}")
    assert log(f"{about}y>") == f"{about}y>"
    for i in range(1000):
        log(f"place {i}")
    assert len(throttle._seen) <= 256
