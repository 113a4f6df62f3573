"""`tandem bench kernels`: packed experts against torch, and against the limits of the machine.

One MoE layer shaped as Qwen3-30B-A3B's, with as many experts as memory easily holds, routed at
random. Two layers are used in turn, so that no cache holds the weights of the next call. The rival
is torch, one expert after the other, in bf16 or fp32, whichever is faster for the case.

Ceilings: up to 16 tokens, summing as many bytes as the chosen experts' packed weights hold; above,
a torch matrix multiplication with as many operations, in the fastest of its types. The latter is
what this machine reaches, not what the unit could; for int8 the unit's peak is about twice that.
"""

import itertools
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from tandem._native import ThreadPool, recommend_threads, read_topology
from tandem.bench.harness import BenchCase, time_call
from tandem.kernels.formats import find_format
from tandem.kernels.native_experts import PackedExperts
