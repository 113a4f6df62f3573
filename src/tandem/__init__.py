"""Tandem: serving and fine-tuning of large language models on heterogeneous hardware."""

import os

__version__ = "0.1.0"

# Nothing else is imported here: Ctrl-C during an import, before the command line has its handler,
# would print a traceback.
if "TANDEM_MAX_ISA" in os.environ:  # noqa: TID251 - config.py is what is not to be imported
    from tandem.core.config import cap_libraries

    cap_libraries()


def __getattr__(name: str) -> object:
    """Import ``LLM`` on first use: it needs torch and the extension, which others do not."""
    if name == "LLM":
        import importlib

        # The module is imported by name: with an import statement, modules below that read
        # ``tandem.__version__`` would depend on it.
        return importlib.import_module("tandem.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
