"""Have clang check what the native code says of its locks: ``python tools/thread_safety.py``.

The fields of ``native/`` name the mutex that guards them (``base/threads/thread_annotations.h``).
GCC, which most builds use, sees nothing of that; clang with ``-Wthread-safety`` refuses code that
touches such a field without its mutex. Without a clang this says so and succeeds.
"""

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("base", "store", "transfer")
FLAGS = ("-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror=thread-safety", "-Inative")
TIMEOUT_S = 600


def check(compiler: str, source: Path) -> str:
    """Return what clang says of one file; empty if nothing is wrong."""
    command = [compiler, *FLAGS, str(source)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def list_sources() -> list[Path]:
    """Return the files that have mutexes or may use what has: not kernels, not bindings."""
    found = (path for folder in FOLDERS for path in (ROOT / "native" / folder).rglob("*.cc"))
    return sorted(path.relative_to(ROOT) for path in found if not path.stem.endswith("_test"))


def main() -> int:
    """Check all files, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", type=Path, help="Files; all if none is named.")
    sources = parser.parse_args().sources or list_sources()
    compiler = shutil.which("clang++")
    if compiler is None:
        sys.stdout.write("thread safety: skipped, there is no clang++ here\n")
        return 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        told = [text for text in pool.map(lambda path: check(compiler, path), sources) if text]
    sys.stderr.write("\n".join(told))
    sys.stdout.write(f"thread safety: {len(sources)} files, {len(told)} with errors\n")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
