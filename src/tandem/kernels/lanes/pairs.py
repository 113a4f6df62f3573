"""The weighted sum of a token's separately computed expert outputs, in the order and rounding of
one call.

If some experts of a token are computed on the host and others on a device, each output arrives
separately. The native kernels sum in ascending order of the experts with fused multiply-adds; this
module does the same, so results do not depend on where an expert was computed.

Shapes: B tokens, D hidden, K experts per token.
"""

import torch
from torch import Tensor

__all__ = ["sum_pairs"]


def sum_pairs(ids_BK: Tensor, w_BK: Tensor, out_BKD: Tensor) -> Tensor:
    """Return the weighted sum of expert outputs, float32 [B, D], new; ids of -1 add nothing.

    No tensor's value is read and no shape depends on one, so the call can be captured in a graph.

    Args:
        ids_BK: expert ids, int64.
        w_BK: router weights, float32.
        out_BKD: expert outputs, float32, zero where the id is -1.
    """
    order_BK = torch.argsort(ids_BK, dim=1, stable=True)
    weights_BK = w_BK.gather(1, order_BK)
    sum_BD = torch.zeros(out_BKD.shape[0], out_BKD.shape[2], device=out_BKD.device)
    for place in range(ids_BK.shape[1]):
        index = order_BK[:, place, None, None].expand(-1, 1, out_BKD.shape[2])
        output_BD = out_BKD.gather(1, index)[:, 0]
        sum_BD = _add_product(sum_BD, weights_BK[:, place, None], output_BD)
    return sum_BD


def _add_product(sum_BD: Tensor, w_B1: Tensor, y_BD: Tensor) -> Tensor:
    """Return ``sum + w * y`` of float32 numbers, rounded once as a fused multiply-add.

    The product is exact in float64. The sum is rounded to odd in float64, so that rounding it again
    to float32 gives the result of a single rounding (Boldo and Melquiond, 2008).
    """
    product, known = w_B1.double() * y_BD.double(), sum_BD.double()
    total = product + known
    back = total - known
    error = (product - back) + (known - (total - back))
    bits = total.view(torch.int64)
    is_short = (error != 0) & (bits & 1 == 0) & torch.isfinite(total)
    # Move the float64 sum one step away from zero if its rounding error has its sign, else one step
    # towards zero.
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(is_short, bits + step, bits).view(torch.float64).float()
