"""gpt-oss: its checkpoints store experts as mxfp4, and its MoE block returns a pair."""

__all__ = ["EXPERT_FORMATS", "PAIR_BLOCK"]

EXPERT_FORMATS = ("mxfp4",)
"""``quant_method`` of checkpoints whose experts ``WeightSource`` decodes."""

PAIR_BLOCK = "GptOssMLP"
"""The MoE block whose ``forward`` returns the router's weights beside its output."""
