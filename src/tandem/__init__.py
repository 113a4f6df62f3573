"""Tandem: serving and fine-tuning of large language models on heterogeneous hardware."""

__version__ = "0.1.0"

import importlib

from tandem.core.config import cap_libraries

cap_libraries()


def __getattr__(name: str) -> object:
    """Import ``LLM`` on first use: it needs torch and the extension, which others do not."""
    if name == "LLM":
        # By name: modules below that read ``tandem.__version__`` do not depend on it.
        return importlib.import_module("tandem.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
