"""gpt-oss: its checkpoints store experts as mxfp4, and its MoE block returns a pair."""

__all__ = ["EXPERT_FORMATS", "PAIR_BLOCKS"]

EXPERT_FORMATS = ("mxfp4",)
"""``quant_method`` of checkpoints whose experts ``WeightSource`` decodes."""

PAIR_BLOCKS = ("GptOssMLP", "Llama4TextMoe")
"""The MoE blocks whose ``forward`` returns something of the router beside its output."""
