"""kt-kernel as a peer, run by its own interpreter (see ``processes``); imports no module of Tandem.

Packs MoE layers from bfloat16 weights in a file and runs them on the CPU, one layer per call.
"""

import sys
import time

import torch
from kt_kernel import kt_kernel_ext
from rival_loop import answer_calls
from safetensors.torch import load_file, save_file

CLASSES = {"int8": "AMXInt8_MOE", "int4": "AMXInt4_MOE", "bf16": "AMXBF16_MOE"}
"""Names of kt-kernel's classes of MoE layers, by weight format. They are named for AMX; on a CPU
without AMX they use AVX-512 kernels.
"""
NARROW_CLASSES = {"bf16": "AVX2BF16_MOE"}
"""Names of the MoE classes in kt-kernel's AVX2 build by weight format; it has a class for bf16
only.
"""
ROWS_STEP = 32
"""kt-kernel's buffers hold a multiple of this many rows."""


class Layer:
    """A layer of experts packed as ``kind`` from gate and up [E, F, D] and down [E, D, F] in
    bfloat16.
    """

    def __init__(self, pool, path, kind, top_k, max_tokens):
        self.pool = pool
        self.sources = load_file(path)
        gate, up, down = (self.sources[name] for name in ("gate", "up", "down"))
        count, inner, hidden = gate.shape
        self.top_k = top_k
        self.on_gpu = torch.zeros(count, dtype=torch.bool)
        config = kt_kernel_ext.moe.MOEConfig(count, top_k, hidden, inner, self.on_gpu.data_ptr())
        config.pool = pool.backend_
        config.max_len = -(-max_tokens // ROWS_STEP) * ROWS_STEP
        config.gate_proj, config.up_proj = gate.data_ptr(), up.data_ptr()
        config.down_proj = down.data_ptr()
        if kind == "bf16":
            # kt-kernel's bf16 class takes one pointer per expert, in one list per NUMA node.
            config.gate_projs = [[expert.data_ptr() for expert in gate]]
            config.up_projs = [[expert.data_ptr() for expert in up]]
            config.down_projs = [[expert.data_ptr() for expert in down]]
        name = CLASSES[kind]
        if not hasattr(kt_kernel_ext.moe, name):
            name = NARROW_CLASSES[kind]
        self.experts = getattr(kt_kernel_ext.moe, name)(config)
        order = torch.arange(count)
        pool.submit(self.experts.load_weights_task(order.data_ptr()))
        pool.sync()

    def forward(self, batch, out):
        task = self.experts.forward_task(
            batch["count"].data_ptr(),
            self.top_k,
            batch["ids"].data_ptr(),
            batch["weights"].data_ptr(),
            batch["x"].data_ptr(),
            out.data_ptr(),
            False,
        )
        self.pool.submit(task)
        self.pool.sync()


class Rival:
    """MoE layers of one shape and weight format, each with the batch it is called with."""

    def __init__(self, threads):
        config = kt_kernel_ext.WorkerPoolConfig()
        config.subpool_count = 1
        config.subpool_numa_map = [0]
        config.subpool_thread_count = [threads]
        self.pool = kt_kernel_ext.CPUInfer(config)
        self.layers, self.batches, self.out = [], [], None

    def load(self, paths, kind, top_k, max_tokens):
        self.layers = [Layer(self.pool, path, kind, top_k, max_tokens) for path in paths]

    def take(self, paths):
        """Read a batch for each layer from files: x [T, D] bfloat16, ids [T, K], weights [T, K]
        float32.
        """
        self.batches = [load_file(path) for path in paths]
        for batch in self.batches:
            batch["count"] = torch.tensor([len(batch["x"])], dtype=torch.int32)
        self.out = torch.zeros_like(self.batches[0]["x"])

    def run(self, nth):
        """Run layer ``nth`` on its batch; return the seconds that this takes."""
        begin = time.perf_counter()
        self.layers[nth].forward(self.batches[nth], self.out)
        return time.perf_counter() - begin

    def save(self, path):
        """Write the output of the last ``run`` to a file."""
        save_file({"out": self.out}, path)


def main():
    answer_calls(lambda: Rival(int(sys.argv[1])))


if __name__ == "__main__":
    main()
