"""What a test can change of the process, in which later tests run."""

import gc
import locale
import logging
import os
import resource
import signal
import sys
import threading
from typing import Any

__all__ = ["list_changes", "read_state"]

OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
"""Variables of the environment that pytest sets, or torch where it is first used."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)


def read_state(*, with_modules: bool = False) -> dict[str, Any]:
    """Return the state by the name of what has it.

    Args:
        with_modules: our modules as well, in half a millisecond.
    """
    state: dict[str, Any] = {
        "garbage collection": gc.isenabled(),
        "folder": os.getcwd(),
        "import path": list(sys.path),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "excepthook": sys.excepthook,
        "unraisablehook": sys.unraisablehook,
        "excepthook of threads": threading.excepthook,
        "locale": locale.setlocale(locale.LC_ALL),
        "log level": logging.root.level,
        "log handlers": list(logging.root.handlers),
        "disabled log level": logging.root.manager.disable,
        "our log level": logging.getLogger("tandem").level,
        "CPUs": os.sched_getaffinity(0),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "address space": resource.getrlimit(resource.RLIMIT_AS),
    }
    state |= {f"${name}": value for name, value in os.environ.items() if name not in OTHERS}
    state |= {number.name: signal.getsignal(number) for number in SIGNALS}
    if (torch := sys.modules.get("torch")) is not None:
        state |= {
            "torch's dtype": torch.get_default_dtype(),
            "torch's gradients": torch.is_grad_enabled(),
            "torch's precision": torch.get_float32_matmul_precision(),
            "torch's determinism": torch.are_deterministic_algorithms_enabled(),
        }
    if with_modules:
        ours = [name for name in sys.modules if name.partition(".")[0] == "tandem"]
        state |= {f"module {name}": sys.modules[name] for name in ours}
    return state


def list_changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs, without what libraries do: they add variables and handlers of their own
    when they are imported or first used, which is in another test for each order.
    """
    new = {name for name in after.keys() - before.keys() if name.startswith("$TANDEM")}
    return {
        name: (before.get(name), after.get(name))
        for name in sorted(before.keys() | new)
        if before.get(name) != after.get(name) and not _is_of_library(after.get(name))
    }


def _is_of_library(value: Any) -> bool:
    """Return True for a function of an installed package."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return callable(value) and "site-packages" in (getattr(module, "__file__", None) or "")
