"""Goal: a program that does not close its model ends as any other, however that comes about.

Method: scripts that end in each way with an answer half read. Each says nothing but what is its own
doing, and its instance is gone.
"""

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import asyncio, atexit, os, sys, threading
import tandem
llm = tandem.LLM("demo", max_model_len=256)
print(*[each.pid for each in llm._context.engine.instances])
stream = llm.stream("def f(", max_tokens=200, ignore_eos=True)
next(stream)
"""
UNREAD = """
other = llm.astream("def g(", max_tokens=200, ignore_eos=True)
async def read(): await anext(other)
asyncio.run(read())
"""
INTERRUPT = "os.kill(os.getpid(), 2)\nfor _ in stream: pass"
FORK = """
child = os.fork()
if not child:
    try:
        list(stream)
    except ConnectionError:
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
THREAD = "threading.Thread(target=lambda: print(len(list(stream)))).start()"
HANDLERS = "atexit.register(stream.close)\natexit.register(llm.close)"
ENDS = {
    "streams that nobody reads": (UNREAD, 0, "", ""),
    "an exception": ("raise ValueError('mine')", 1, "", "ValueError: mine"),
    "sys.exit": ("sys.exit(3)", 3, "", ""),
    "handlers at exit": (HANDLERS, 0, "", ""),
    "a thread that still reads": (THREAD, 0, "199", ""),
    "an interrupt": (INTERRUPT, -2, "", "KeyboardInterrupt"),
    "a forked child that reads too": (FORK, 0, "", ""),
    "nobody has it any more": ("del llm, stream", 0, "", ""),
    "closed": ("llm.close()", 0, "", ""),
}


@pytest.mark.parametrize(
    "end",
    [name if number < 1 else pytest.param(name, marks=pytest.mark.slow)
     for number, name in enumerate(ENDS)],
)  # fmt: skip
def test_a_program_ends_silently_and_frees_the_instance(end):
    code, status, said, error = ENDS[end]
    command = [sys.executable, "-c", BEGIN + code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    first, *rest = ended.stdout.splitlines()
    assert (ended.returncode, rest) == (status, [said] * bool(said)), ended.stderr
    assert ended.stderr.splitlines()[-1:] == [error] * bool(error)
    assert ended.stderr.count("Traceback") == (error != "")
    pids = first.split()
    assert pids
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
