"""Number of tokens from which streaming a prompt's experts to the GPU is faster. Pure."""

import msgspec

from tandem.placement.costs import Efficiencies, Placement, chunk_time
from tandem.placement.hardware import HardwareSpec
from tandem.placement.shape import ModelShape

__all__ = ["find_stream_tokens"]

MAX_TOKENS = 1 << 17


def find_stream_tokens(
    spec: HardwareSpec, shape: ModelShape, place: Placement, eff: Efficiencies
) -> int:
    """Return the fewest tokens of a step that streamed experts compute faster than the CPU.

    Streaming takes the same time for any number of tokens, the CPU's time grows with them.

    Args:
        spec: the machine.
        shape: the model.
        place: placement with experts on the CPU and a GPU.
        eff: shares of the peaks that are reached.

    Returns: 0 if streaming is never faster.
    """

    def is_faster(tokens: int) -> bool:
        times = [
            chunk_time(
                spec,
                shape,
                msgspec.structs.replace(place, prefill=kind),
                eff,
                tokens=tokens,
                context=tokens / 2,
            ).seconds
            for kind in ("streamed", "cpu")
        ]
        return times[0] < times[1]

    if not is_faster(MAX_TOKENS):
        return 0
    low, high = 0, MAX_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return high
