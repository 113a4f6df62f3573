"""gpt-oss: its checkpoints store experts as mxfp4, and its MoE block returns a pair (the output and
the router's weights).
"""

__all__ = ["EXPERT_FORMATS", "PAIR_BLOCKS"]

EXPERT_FORMATS = ("mxfp4",)
"""Values of ``quant_method`` for checkpoints whose experts ``WeightSource`` decodes."""

PAIR_BLOCKS = ("GptOssMLP", "Llama4TextMoe")
"""MoE block classes whose ``forward`` returns the router's result beside the output."""
