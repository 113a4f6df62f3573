"""Goal: ``TANDEM_MAX_ISA`` holds our kernels, torch, MKL and oneDNN to one instruction set.

Method: real processes, since all of them read their variables once; the verbose lines of MKL and
oneDNN say what they chose.
"""

import os
import subprocess
import sys

import pytest

from tandem._native import kernel_isas
from tandem.core.config import ISA_VARIABLES, LIBRARY_VARIABLES, MAX_ISA, child_environment

PROBE = """
import tandem, torch
from tandem._native import cpu_features, kernel_isas
with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
    torch.randn(64, 64) @ torch.randn(64, 64)
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
    torch.mkldnn_convolution(
        torch.randn(1, 8, 16, 16), torch.randn(8, 8, 3, 3), None, [0, 0], [1, 1], [1, 1], 1
    )
print("torch", torch.backends.cpu.get_cpu_capability())
print("kernels", *kernel_isas())
print("bf16", cpu_features().avx512_bf16)
"""
TORCH = {"plain": "DEFAULT", "avx2": "AVX2"}
MKL_SAYS = {
    "plain": "Intel(R) Streaming SIMD Extensions 4.2",
    "avx2": "Intel(R) Advanced Vector Extensions 2 (Intel(R) AVX2)",
    "avx512_vnni": "with support of Intel(R) Deep Learning Boost (Intel(R) DL Boost), ",
}
ONEDNN_SAYS = {
    "plain": "isa:Intel SSE4.1",
    "avx2": "isa:Intel AVX2",
    "avx512_vnni": "isa:Intel AVX-512 with Intel DL Boost",
    "avx512_bf16": "isa:Intel AVX-512 with Intel DL Boost and bfloat16 support",
}

ABSENT = "is not usable on this machine, or not in this build (TANDEM_KERNEL_ISAS)"


def run_python(code: str, isa: str | None) -> subprocess.CompletedProcess:
    names = (MAX_ISA, *LIBRARY_VARIABLES)
    env = {name: value for name, value in os.environ.items() if name not in names}
    if isa is not None:
        env[MAX_ISA] = isa
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "isa",
    [
        pytest.param("plain", marks=SLOW),
        "avx2",
        pytest.param("avx512_vnni", marks=SLOW),
        "avx512_bf16",
    ],
)
def test_every_library_obeys_the_cap(isa: str):
    if isa not in kernel_isas():
        pytest.skip(f"the machine, the build or the cap of this run has no {isa}")
    run = run_python(PROBE, isa)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert f"torch {TORCH.get(isa, 'AVX512')}" in lines
    [kernels] = [line.split()[1:] for line in lines if line.startswith("kernels")]
    assert kernels[-1] == isa
    assert f"bf16 {isa == 'avx512_bf16'}" in lines
    [mkl] = [line for line in lines if line.startswith("MKL_VERBOSE oneMKL")]
    # On a CPU of another maker MKL names no instruction set, whatever it uses.
    if "Intel(R) Architecture processors" not in mkl:
        assert MKL_SAYS.get(isa, "") in mkl
    [onednn] = [line for line in lines if line.startswith("onednn_verbose") and ",cpu,isa:" in line]
    assert onednn.endswith(ONEDNN_SAYS[isa])


def test_a_child_inherits_the_cap_and_no_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MAX_ISA, "avx2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("TANDEM_SERVER__API_KEY", "secret")
    env = child_environment()
    assert (env[MAX_ISA], env["ATEN_CPU_CAPABILITY"]) == ("avx2", "avx2")
    assert "TANDEM_SERVER__API_KEY" not in env


LOADED = "import sys, types; sys.modules['torch'] = types.ModuleType('torch'); "
"""As after `import torch`, which takes seconds."""


@pytest.mark.parametrize(
    ("code", "isa", "said"),
    [
        ("import tandem._native", "avx3", f"choose one of {', '.join(ISA_VARIABLES)}"),
        (f"{LOADED}import tandem._native", "avx2", "torch was loaded without ATEN_CPU_CAPABILITY="),
    ],
)
def test_a_cap_that_cannot_hold_is_an_error(code: str, isa: str, said: str):
    run = run_python(code, isa)
    assert run.returncode == 1
    assert said in run.stderr.splitlines()[-1]


def test_a_variant_that_is_not_there_is_an_error():
    missing = [isa for isa in ISA_VARIABLES if isa not in kernel_isas()]
    if MAX_ISA in os.environ or not missing:
        pytest.skip("this machine and this build have every variant")
    run = run_python("import tandem._native", missing[0])
    assert ABSENT in run.stderr


def test_a_kernel_above_the_cap_is_refused_by_its_name():
    sizes = "group_size=32, has_minimum=False, num_experts=1, hidden_size=64, intermediate_size=64"
    code = f"from tandem._native import ExpertBank; ExpertBank(bits=8, {sizes}, isa='avx512_bw')"
    run = run_python(code, "avx2")
    assert f"avx512_bw {ABSENT}" in run.stderr


def test_a_command_says_it_in_one_line():
    code = "import sys; sys.argv = ['tandem', 'doctor']; from tandem.__main__ import main; main()"
    run = run_python(code, "avx3")
    assert run.returncode == 1
    assert run.stderr.startswith("tandem: [config.max_isa] TANDEM_MAX_ISA=avx3: choose one of")
    assert len(run.stderr.splitlines()) == 1


def test_doctor_says_which_is_used_and_why():
    code = "import sys; sys.argv = ['tandem', 'doctor']; from tandem.__main__ import main; main()"
    text = " ".join(run_python(code, "plain").stdout.split())
    assert "plain: TANDEM_MAX_ISA=plain allows no wider one (usable: plain)" in text
    assert "ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2" in text
    assert "the widest that this CPU" in " ".join(run_python(code, None).stdout.split())
