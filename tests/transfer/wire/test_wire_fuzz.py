"""The decoders of the wire format under libFuzzer, ASan and UBSan, from a corpus of valid bytes.

Method: CMake builds the target with clang into build/; it runs over the corpus and then on its own
for some seconds. Skipped by name where clang or its fuzzer runtime is absent.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CORPUS = ROOT / "native" / "transfer" / "wire" / "corpus"
FUZZ_S = 20

pytestmark = pytest.mark.slow


def run(*command: str, **how) -> subprocess.CompletedProcess[str]:
    bin_folder = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=env, **how
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    compiler = shutil.which("clang++")
    if compiler is None:
        pytest.skip("clang++ is absent")
    probe = tmp_path_factory.mktemp("probe") / "probe.cc"
    probe.write_text(
        "#include <cstddef>\n#include <cstdint>\n"
        'extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }\n'
    )
    flags = ["-fsanitize=fuzzer,address,undefined", "-o", str(probe.with_suffix(""))]
    if run(compiler, str(probe), *flags).returncode != 0:
        pytest.skip("clang's fuzzer runtime (libclang-rt-dev) is absent")
    build = ROOT / "build" / "fuzz"
    options = [
        "-DTANDEM_BUILD_PYTHON=OFF",
        "-DTANDEM_BUILD_FUZZERS=ON",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    made = run("cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *options)
    assert made.returncode == 0, made.stderr
    made = run("cmake", "--build", str(build), "--target", "wire_fuzz")
    assert made.returncode == 0, made.stdout + made.stderr
    return build / "native" / "wire_fuzz"


def test_no_bytes_break_the_decoders(target, tmp_path):
    found = tmp_path / "found"
    found.mkdir()
    done = run(
        str(target), str(found), str(CORPUS), f"-max_total_time={FUZZ_S}", "-max_len=4096",
        "-seed=1", f"-artifact_prefix={tmp_path}/", "-print_final_stats=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    stats = dict(
        line.removeprefix("stat::").split(":") for line in done.stderr.splitlines()
        if line.startswith("stat::")
    )  # fmt: skip
    print(f"{stats['number_of_executed_units'].strip()} inputs in {FUZZ_S} s")
    assert int(stats["number_of_executed_units"]) > 10_000
