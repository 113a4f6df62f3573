"""The instruction set of rivals: if ``TANDEM_MAX_ISA`` caps ours, a rival is built or run with no
wider one.
"""

from tandem._native import cpu_features
from tandem.core.config import ISA_VARIABLES, MAX_ISA
from tandem.core.errors import UnsupportedError

__all__ = ["check_peer_isa", "list_ggml_settings", "list_kt_settings"]

LEVELS = tuple(ISA_VARIABLES)
GGML_OPTIONS = {
    "avx2": ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"),
    "avx512_bw": ("AVX512",),
    "avx512_vnni": ("AVX512_VNNI", "AVX_VNNI"),
    "avx512_bf16": ("AVX512_BF16", "AVX512_VBMI"),
    "amx": ("AMX_TILE", "AMX_INT8", "AMX_BF16"),
}
"""Build options of ggml (llama.cpp's tensor library) that each instruction set adds to those of the
narrower sets before it.
"""
KT_VARIANTS = {
    "avx2": "avx2",
    "avx512_bw": "avx512_base",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx": "amx",
}
"""Names of kt-kernel's builds for one instruction set, by our name of the instruction set; its
wheel contains all of them.
"""


def list_ggml_settings() -> dict[str, str]:
    """Return the environment variables with which pip builds llama.cpp for the cap; empty without a
    cap.
    """
    cap = cpu_features().cap
    if not cap:
        return {}
    switches = ["-DGGML_NATIVE=OFF"]
    for level, options in GGML_OPTIONS.items():
        state = "ON" if LEVELS.index(level) <= LEVELS.index(cap) else "OFF"
        switches += [f"-DGGML_{option}={state}" for option in options]
    return {"CMAKE_ARGS": " ".join(switches)}


def list_kt_settings() -> dict[str, str]:
    """Return the environment variables with which kt-kernel loads its variant for the cap.

    Raises: UnsupportedError (kt-kernel has no variant that narrow).
    """
    cap = cpu_features().cap
    if not cap:
        return {}
    if cap not in KT_VARIANTS:
        what = f"{MAX_ISA}={cap}: its narrowest variant is avx2"
        raise UnsupportedError("bench.kt_kernel", what)
    return {"KT_KERNEL_CPU_VARIANT": KT_VARIANTS[cap]}


def check_peer_isa(peer: str, isa: str) -> None:
    """Raise an error if a peer was built for a wider instruction set than the cap.

    Args:
       peer: the peer's name, for the error.
       isa: the instruction set that the peer reports.

    Raises: UnsupportedError (it was).
    """
    cap = cpu_features().cap
    if cap and LEVELS.index(isa) > LEVELS.index(cap):
        what = (
            f"{peer} is built for {isa}, above {MAX_ISA}={cap}: give a build for {cap}, "
            "ik_llama.cpp's by IK_LLAMA_CPP_LIB_PATH"
        )
        raise UnsupportedError("bench.check_peer_isa", what)
