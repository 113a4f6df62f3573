"""Goal: the package uses no private attribute of asyncio or of an event loop.

They change between Python versions without a word; what they were used for, tasks that are none,
broke ``asyncio.timeout`` in handlers.
"""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "tandem"
PRIVATE = re.compile(
    r"\basyncio\._\w+|\b_asyncio_future_blocking\b|\b_run_once\b|\b\w*loop\._(ready|thread_id|run|stopping)\b"
)


def test_what_was_used_is_found():
    for line in ("asyncio._register_task(self)", "ready = loop._ready", "own_loop._thread_id = 1"):
        assert PRIVATE.search(line), line


def test_no_private_attribute_in_the_package():
    found = [
        f"{path.relative_to(SOURCE)}: {match.group()}"
        for path in sorted(SOURCE.rglob("*.py"))
        for match in PRIVATE.finditer(path.read_text())
    ]
    assert found == []
