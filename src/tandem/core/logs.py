"""Log lines: ``key=value`` text on standard error, with the request's id where there is one.

Only a process's entry point calls ``configure_logging``; the library never does. INFO is a change
of state of a process or a peer, and the access log's one line for each HTTP request; all else that
is per request is DEBUG, and nothing is logged per token.
"""

import logging
import sys
from contextvars import ContextVar
from enum import StrEnum

from tandem.core.errors import TandemError

__all__ = ["LogLevel", "configure_logging", "current_request_id"]


class LogLevel(StrEnum):
    """The least severe level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


current_request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Set while a request is handled; every log record made meanwhile carries it."""


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
                # The world failed, not the code: the message names the cause and the remedy.
                line += f" error={error}"
            else:
                line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging(process: str, level: str = LogLevel.INFO) -> None:
    """Send this process's log lines to standard error; call once, at its entry point.

    Raises: ValueError (``level`` is no ``LogLevel``).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_KeyValueFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LogLevel(level).upper())
    # These say per request what we count in metrics.
    for name in ("uvicorn.access", "httpx", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
