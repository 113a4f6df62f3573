"""Log lines on standard error, as ``key=value`` text or JSON, with the request's id if there is
one.

Only a process's entry point calls ``configure_logging``; the library never does. INFO is for
changes of state of a process or a peer, and for the access log's line per HTTP request; anything
else per request is DEBUG, and nothing is logged per token.
"""

import json
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum

from tandem.core.errors import TandemError

__all__ = ["LogFormat", "LogLevel", "configure_logging", "current_request_id"]

MAX_REPEATS = 10
"""Number of warnings from one place in the code that are written within ``REPEAT_WINDOW_S``."""
REPEAT_WINDOW_S = 10.0
_MAX_PLACES = 256
_KEY_CHARS = 48
"""Number of leading characters by which messages of one place are taken as equal; libraries put
varying addresses later in their messages."""


class LogLevel(StrEnum):
    """The least severe level of the log lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """The format of a log line."""

    TEXT = "text"
    JSON = "json"


current_request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request being handled in this context; every log record made meanwhile carries it."""


class _KeyValueFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        request_id = current_request_id.get()
        parts = [
            f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}",
            f"level={record.levelname.lower()}",
            f"process={self._process}",
            f"logger={record.name}",
        ]
        if request_id:
            parts.append(f"request_id={request_id}")
        parts.append(record.getMessage())
        line = " ".join(parts)
        if record.exc_info:
            error = record.exc_info[1]
            if isinstance(error, TandemError | OSError):
                # Log no traceback for an error that the environment causes: its message names the
                # cause and the remedy.
                line += f" error={error}"
            else:
                line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonFormatter(logging.Formatter):
    """A formatter that writes one JSON object per line, with fields for the parts of the
    message.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, str | int] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process or 0,
            "logger": record.name,
        }
        request_id = current_request_id.get()
        if request_id:
            line["request_id"] = request_id
        line["message"] = record.getMessage()
        if record.exc_info:
            error = record.exc_info[1]
            if isinstance(error, TandemError | OSError):
                line["error"] = str(error)
            else:
                line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _RepeatFilter(logging.Filter):
    """A filter that drops repeated warnings and errors of one place, and adds their number later.

    A server without free descriptors, for example, would write thousands of equal lines a second.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._seen: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if a log record is to be written, and is not a repetition of a recent one."""
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, str(record.msg)[:_KEY_CHARS])
        now_s = self._now_s()
        begin_s, count = self._seen.pop(key, (now_s, 0))
        num_dropped = max(count - MAX_REPEATS, 0)
        if now_s - begin_s >= REPEAT_WINDOW_S:
            if num_dropped:
                record.msg = f"{record.getMessage()} suppressed={num_dropped}"
                record.args = None
            begin_s, count = now_s, 0
        self._seen[key] = (begin_s, count + 1)
        if len(self._seen) > _MAX_PLACES:
            self._seen.popitem(last=False)
        return count < MAX_REPEATS


def configure_logging(process: str, level: str = LogLevel.INFO, form: str = LogFormat.TEXT) -> None:
    """Send this process's log lines to standard error; call once, at its entry point.

    Raises: ValueError (``level`` is not a ``LogLevel``, or ``form`` not a ``LogFormat``).
    """
    handler = logging.StreamHandler(sys.stderr)
    is_json = LogFormat(form) is LogFormat.JSON
    handler.setFormatter(_JsonFormatter(process) if is_json else _KeyValueFormatter(process))
    handler.addFilter(_RepeatFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LogLevel(level).upper())
    # Silence these loggers below WARNING: they log every request, which our metrics count already.
    for name in ("uvicorn.access", "httpx", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
