"""Lint, types and import contracts: what CI checks beside the tests."""

import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
CHECKS = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "types": ["pyright"],
    "contracts": ["lint-imports"],
    "circles": ["python", "tools/import_circles.py"],
    "names": ["python", "tools/names.py"],
    "locks": ["python", "tools/thread_safety.py"],
}


def main() -> int:
    """Run all checks; return the number that failed."""
    failed: list[str] = []
    for name, (tool, *arguments) in CHECKS.items():
        begin = time.monotonic()
        result = subprocess.run([BIN / tool, *arguments], check=False, timeout=600)
        state = "ok" if result.returncode == 0 else "FAILED"
        sys.stdout.write(f"{name:10} {state} {time.monotonic() - begin:.1f} s\n")
        sys.stdout.flush()
        if result.returncode != 0:
            failed.append(name)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
