"""Tandem: serving and fine-tuning of large language models on heterogeneous hardware."""

__version__ = "0.1.0"
