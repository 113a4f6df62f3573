"""The compiled core: machine topology, thread pool, memory, probes, kernels.

Importing this package loads the extension ``_core`` (C++20, source under ``native/``); ``import
tandem`` does not. The extension knows nothing of torch: tensors cross as arrays. Its errors are
those of ``tandem.core.errors``; its calls release the GIL while they work.
"""

from tandem.core.errors import UnsupportedError

try:
    from tandem._native._core import (
        AlignedBuffer,
        CacheSizes,
        CgroupLimits,
        CoreBatch,
        CpuFeatures,
        CudaDevice,
        CudaProbe,
        DecodeAttention,
        ExpertBank,
        HostMemory,
        HugepagePool,
        HugepageState,
        NumaNode,
        PageKind,
        ProbeResult,
        RailSet,
        RailState,
        RailStatus,
        RemoteBufferInfo,
        SegmentDescription,
        SharedArray,
        SliceChoice,
        ThreadAdvice,
        ThreadPool,
        Topology,
        TransferCore,
        WakeupTimes,
        count_expert_bytes,
        cpu_features,
        error_codes,
        kernel_isas,
        probe_cma,
        probe_cuda,
        probe_io_uring,
        raise_error,
        read_topology,
        recommend_threads,
        split_capacity,
    )
except ImportError as error:
    raise UnsupportedError(
        "native.load",
        f"the compiled core cannot be loaded ({error}): build it with `pip install -e .` in the "
        "source tree, which needs a C++20 compiler, or install a wheel of this platform",
    ) from error

__all__ = [
    "AlignedBuffer",
    "CacheSizes",
    "CgroupLimits",
    "CoreBatch",
    "CpuFeatures",
    "CudaDevice",
    "CudaProbe",
    "DecodeAttention",
    "ExpertBank",
    "HostMemory",
    "HugepagePool",
    "HugepageState",
    "NumaNode",
    "PageKind",
    "ProbeResult",
    "RailSet",
    "RailState",
    "RailStatus",
    "RemoteBufferInfo",
    "SegmentDescription",
    "SharedArray",
    "SliceChoice",
    "ThreadAdvice",
    "ThreadPool",
    "Topology",
    "TransferCore",
    "WakeupTimes",
    "count_expert_bytes",
    "cpu_features",
    "error_codes",
    "kernel_isas",
    "probe_cma",
    "probe_cuda",
    "probe_io_uring",
    "raise_error",
    "read_topology",
    "recommend_threads",
    "split_capacity",
]
