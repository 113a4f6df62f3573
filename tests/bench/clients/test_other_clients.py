"""``tandem bench serve``, SGLang's and vLLM's client tell what a script did, within 1 %.

Method: a server that sends each token at a fixed time; the clients run as programs against it, one
after the other. Times are compared with what the server was told to do, so a machine that is busy
with other things fails this: it is run by hand, and alone.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent))

from scripted_server import Script

pytestmark = [pytest.mark.long, pytest.mark.download]

SGLANG, SGLANG_NEEDS = "sglang==0.5.23", ("orjson", "pybase64", "pillow", "aiohttp", "tqdm")
VLLM = "vllm==0.33.0"
VLLM_NEEDS = (
    "pybase64", "pillow", "cachetools", "cloudpickle", "py-cpuinfo", "blake3", "aiohttp", "tqdm",
    "cbor2", "openai-harmony", "pandas",
)  # fmt: skip
"""Beside what ``[dev]`` brings; the engine's own, such as CUDA's, are not imported."""
NUM_REQUESTS, TOKENS, FIRST_S, GAP_S = 8, 41, 2.0, 0.05
LAST_S = FIRST_S + (TOKENS - 1) * GAP_S
SCRIPT = {
    "completed": NUM_REQUESTS,
    "duration": LAST_S,
    "total_output_tokens": NUM_REQUESTS * TOKENS,
    "request_throughput": NUM_REQUESTS / LAST_S,
    "output_throughput": NUM_REQUESTS * TOKENS / LAST_S,
    "concurrency": NUM_REQUESTS,
    **{f"{kind}_ttft_ms": 1000 * FIRST_S for kind in ("mean", "median", "p99")},
    **{f"{kind}_tpot_ms": 1000 * GAP_S for kind in ("mean", "median", "p99")},
    "mean_itl_ms": 1000 * GAP_S,
    "median_itl_ms": 1000 * GAP_S,
    "mean_e2e_latency_ms": 1000 * LAST_S,
    "median_e2e_latency_ms": 1000 * LAST_S,
}
"""By SGLang's names. Single gaps of 50 ms are not known to 1 %, so ITL has no percentile here."""


@pytest.fixture
def script():
    with Script(tokens=TOKENS, first_s=FIRST_S, gap_s=GAP_S) as running:
        running.tokens_per_event = 1
        yield running


def run(command: list, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def find_wrong(figures: dict) -> dict:
    """Return the figures that are more than 1 % beside the script, each as a ratio to it."""
    ratios = {name: figures[name] / value for name, value in SCRIPT.items()}
    print({name: round(ratio, 4) for name, ratio in ratios.items()})
    return {name: ratio for name, ratio in ratios.items() if not 0.99 <= ratio <= 1.01}


def test_ours(script, tmp_path):
    out = tmp_path / "out.jsonl"
    load = ["--num-prompts", NUM_REQUESTS, "--random-input-len", 64, "--random-output-len", TOKENS]
    command = [sys.executable, "-m", "tandem", "bench", "serve", "--base-url", script.url]
    run([str(each) for each in [*command, *load, "--output-file", out]])
    report = json.loads(out.read_text().splitlines()[-1])
    figures = {name: report[name] for name in SCRIPT if name in report}
    for kind in ("mean", "median", "p99"):
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_latency_ms"):
            figures[f"{kind}_{name}"] = report[name][kind]
    assert find_wrong(figures) == {}


def fetch(folder: Path, wheel: str, needs: tuple[str, ...]) -> Path:
    """Return a wheel of the package index, with what its client imports beside it in ``needs``."""
    target = folder / "needs"
    pip = [sys.executable, "-m", "pip"]
    commands = [
        [*pip, "download", "--no-deps", "--dest", folder, wheel],
        [*pip, "install", "--target", target, *needs],
    ]
    if not target.exists():
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            if done.returncode != 0:
                pytest.skip(f"pip does not install {wheel}: {done.stderr[-300:]}")
    (found,) = folder.glob(f"{wheel.partition('=')[0]}-*.whl")
    return found


@pytest.fixture(scope="module")
def sglang_path(pytestconfig) -> list[Path]:
    """The client's files of SGLang's wheel, without the engine, and what they import."""
    folder = pytestconfig.cache.mkdir("sglang")
    wheel = fetch(folder, SGLANG, SGLANG_NEEDS)
    root = folder / "client"
    with zipfile.ZipFile(wheel) as opened:
        for name in opened.namelist():
            if name.startswith("sglang/benchmark/") or name == "sglang/srt/utils/network.py":
                opened.extract(name, root)
    # Of the engine the client reads one constant.
    for package in ("", "srt", "srt/utils", "srt/disaggregation"):
        path = root / "sglang" / package / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    constant = root / "sglang" / "srt" / "disaggregation" / "utils.py"
    constant.write_text('FAKE_BOOTSTRAP_HOST = "2.2.2.2"\n')
    return [root, folder / "needs"]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of the script's words, by which SGLang's client counts again."""
    vocab = {f"t{i}": i for i in range(1000)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_sglangs(script, tmp_path, sglang_path):
    write_tokenizer(tmp_path)
    out = tmp_path / "out.jsonl"
    options = {
        "--backend": "sglang-oai",
        "--base-url": script.url,
        "--model": "scripted",
        "--tokenizer": tmp_path,
        "--dataset-name": "random-ids",
        "--num-prompts": NUM_REQUESTS,
        "--random-input-len": 64,
        "--random-output-len": TOKENS,
        "--random-range-ratio": 1.0,
        "--output-file": out,
    }
    command = [sys.executable, "-m", "sglang.benchmark.serving"]
    command += [str(part) for pair in options.items() for part in pair]
    paths = ":".join(str(path) for path in sglang_path)
    run(command, env={"PYTHONPATH": paths, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    report = json.loads(out.read_text().splitlines()[-1])
    wrong = find_wrong(report)
    # It opens a connection within each request, and counts tokens by its own tokenizer.
    assert set(wrong) <= {"duration", "request_throughput", "output_throughput", "concurrency"}


@pytest.fixture(scope="module")
def vllm_path(pytestconfig) -> list[Path]:
    """The Python files of vLLM's wheel, without its kernels, and what the client imports."""
    folder = pytestconfig.cache.mkdir("vllm")
    wheel, root = fetch(folder, VLLM, VLLM_NEEDS), folder / "client"
    if not root.exists():
        with zipfile.ZipFile(wheel) as opened:
            names = [name for name in opened.namelist() if name.endswith(".py")]
            opened.extractall(root, [name for name in names if name.startswith("vllm/")])
    # Of the engine the client takes one function, which the load does not call.
    lora = root / "vllm" / "lora"
    (lora / "__init__.py").write_text("")
    (lora / "utils.py").write_text("def get_adapter_absolute_path(path):\n    return path\n")
    return [root, folder / "needs"]


VLLM_PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""As `vllm bench serve`, which imports the engine before it reads its arguments."""


def test_vllms(script, tmp_path, vllm_path):
    write_tokenizer(tmp_path)
    options = {
        "--backend": "openai",
        "--base-url": script.url,
        "--model": "scripted",
        "--tokenizer": tmp_path,
        "--dataset-name": "random",
        "--num-prompts": NUM_REQUESTS,
        "--random-input-len": 64,
        "--random-output-len": TOKENS,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--result-dir": tmp_path,
        "--result-filename": "out.json",
    }
    command = [sys.executable, "-W", "ignore", "-c", VLLM_PROGRAM, "--ignore-eos", "--save-result"]
    command += [str(part) for pair in options.items() for part in pair]
    paths = ":".join(str(path) for path in vllm_path)
    run(command, env={"PYTHONPATH": paths, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    report = json.loads((tmp_path / "out.json").read_text())
    figures = {name: report.get(name.replace("e2e_latency", "e2el")) for name in SCRIPT}
    # It does not tell how many requests were under way on average.
    figures["concurrency"] = NUM_REQUESTS
    assert find_wrong(figures) == {}
