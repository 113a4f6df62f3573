"""Tandem: serving and fine-tuning of large language models on heterogeneous hardware."""

__version__ = "0.1.0"

from tandem.core.config import cap_libraries

cap_libraries()
