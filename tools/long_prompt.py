"""One very long prompt through `tandem serve`: ``python tools/long_prompt.py --tokens 1000000``.

A hybrid of two layers, one with a state and one with KV, random weights. The prompt is asked for
once, then, with another server that begins with empty memory, again: its KV and state come from the
SSD tier that the first one left. Printed is a JSON object: seconds, tokens a second, and memory as
the formulas say beside what the kernel counts. Exit status 1 if the second answer is another one or
computed more than a block and what follows the last whole block.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoConfig

from tandem.bench.children import start_child
from tandem.bench.serving.model import write_random_weights
from tandem.models.loading.loader import make_kv_layout
from tandem.models.planning.planner import plan_model

MIB = 1 << 20
DEMO = Path(__file__).parents[1] / "src" / "tandem" / "models" / "demo"
BLOCK = 64
MAX_TOKENS = 32
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
QUIET_S = 3.0
"""Seconds without a write after which nothing is left to be written."""
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 300.0, 6 * 3600.0


def write_model(folder: Path, num_tokens: int) -> None:
    """Write the hybrid, with the demo model's tokenizer."""
    vocab_size = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    config = AutoConfig.for_model(
        "qwen3_5_text",
        **SHAPE,
        vocab_size=vocab_size,
        max_position_embeddings=num_tokens + 2 * MAX_TOKENS,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    write_random_weights(folder, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)


@contextlib.contextmanager
def serve(model: Path, ssd: Path, num_blocks: int, memory: str) -> Iterator[httpx.Client]:
    """Run a server that keeps KV on the SSD and yield a client of it; SIGTERM ends it."""
    flags = {
        "--model.dtype": "bfloat16",
        "--engine.num-kv-blocks": num_blocks,
        "--engine.num-state-slots": 64,
        "--engine.state-every": 65_536,
        "--server.max-body-bytes": 64 * MIB,
        "--server.request-timeout-s": ANSWER_TIMEOUT_S,
        "--store.memory": memory,
        "--store.ssd-dir": ssd,
        "--tiers.decision": "load",
        "--tiers.prefetch": "wait",
        "--tiers.lookup-timeout-ms": 60_000,
        "--tiers.load-deadline-ms": 600_000,
        "--tiers.max-queued-stores": 1_000_000,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    command = [sys.executable, "-m", "tandem", "serve", str(model), "--port", "0", "--json", *words]
    pipe = subprocess.PIPE
    process = start_child(command, stdout=pipe, text=True)
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        url = read_url(process.stdout)
        timer.cancel()
        with httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            yield client
    finally:
        timer.cancel()
        process.send_signal(signal.SIGTERM)
        process.wait(START_TIMEOUT_S)


def read_url(lines: Iterator[str] | Any) -> str:
    """Return the address in the JSON document that a server prints once it is ready."""
    text = ""
    for line in lines:
        text += line
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(text)["url"]
    raise SystemExit(f"the server did not start: {text}")


def ask(client: httpx.Client, name: str, prompt: list[int]) -> dict[str, Any]:
    """Return text, cached tokens, and the seconds of the first token and of each later one."""
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, times, usage = "", [], {}
    begin_s = time.monotonic()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(answer.read().decode())
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            if event["choices"]:
                text += event["choices"][0]["text"]
                times.append(time.monotonic() - begin_s)
    decode_s = (times[-1] - times[0]) / max(1, usage["completion_tokens"] - 1)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"text": text, "cached": cached, "first_s": times[0], "decode_s": decode_s}


def read_stats(client: httpx.Client) -> dict[str, Any]:
    """Return what `/server_info` says of the instance."""
    return client.get("/server_info").json()


def read_cpu_s(pid: int) -> float:
    """Return the processor time of a process so far; under load the clock says little."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had in RAM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def wait_stored(client: httpx.Client, num_blocks: int, timeout_s: float) -> float:
    """Return the seconds until so many blocks, and a state, have been stored."""
    begin_s, stats = time.monotonic(), {}
    while time.monotonic() - begin_s < timeout_s:
        stats = read_stats(client)["stats"]
        if stats["stored_blocks"] >= num_blocks and stats["stored_states"]:
            return time.monotonic() - begin_s
        time.sleep(0.2)
    raise SystemExit(f"{num_blocks} blocks were not stored in {timeout_s:.0f} s: {stats}")


def wait_written(ssd: Path, timeout_s: float) -> None:
    """Wait until the SSD tier, which writes behind, has been quiet for a while."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        times = [path.stat().st_mtime for path in ssd.rglob("*") if path.is_file()]
        if times and time.time() - max(times) > QUIET_S:
            return
        time.sleep(0.2)
    raise SystemExit(f"the SSD was written to for more than {timeout_s:.0f} s")


def run(num_tokens: int, folder: Path, memory: str) -> dict[str, Any]:
    """Ask both servers; return what was found."""
    model, ssd = folder / "model", folder / "ssd"
    ssd.mkdir(mode=0o700)
    write_model(model, num_tokens)
    spec = plan_model(model, dtype="bfloat16").spec
    num_blocks = -(-(num_tokens + 2 * MAX_TOKENS) // BLOCK)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(16, spec.vocab_size, (num_tokens,), generator=generator).tolist()
    layout, states = make_kv_layout(spec, BLOCK, "auto"), spec.state_layout
    assert states is not None, "a model without states"
    with serve(model, ssd, num_blocks, memory) as client:
        info = read_stats(client)
        pid, idle = info["instance"]["pid"], read_peak_bytes(info["instance"]["pid"])
        begun_s = read_cpu_s(pid)
        first = ask(client, "model", prompt)
        cpu_s = read_cpu_s(pid) - begun_s
        again = ask(client, "model", prompt)
        stored_s = wait_stored(client, num_tokens // BLOCK, 600.0)
        wait_written(ssd, 600.0)
        peak = read_peak_bytes(pid)
    kept = sum(path.stat().st_size for path in ssd.rglob("*") if path.is_file())
    with serve(model, ssd, num_blocks, memory) as client:
        hit = ask(client, "model", prompt)
        loaded = read_stats(client)["stats"]
    is_right = first["text"] == again["text"] == hit["text"]
    least = (num_tokens - 1) // BLOCK * BLOCK - BLOCK
    return {
        "tokens": num_tokens,
        "prefill_s": round(first["first_s"], 2),
        "prefill_tokens_per_s": round(num_tokens / first["first_s"]),
        "prefill_and_decode_cpu_s": round(cpu_s, 1),
        "decode_ms": round(first["decode_s"] * 1e3, 2),
        "hit_in_memory_s": round(again["first_s"], 3),
        "hit_in_memory_tokens": again["cached"],
        "stored_after_s": round(stored_s, 2),
        "hit_from_ssd_s": round(hit["first_s"], 3),
        "hit_from_ssd_tokens": hit["cached"],
        "loaded_mib": round(loaded["loaded_bytes"] / MIB, 1),
        "kv_formula_mib": round(layout.bytes_per_token * num_tokens / MIB, 1),
        "state_formula_mib": round(states.bytes_per_state / MIB, 3),
        "instance_grew_mib": round((peak - idle) / MIB, 1),
        "ssd_mib": round(kept / MIB, 1),
        "same_answer": is_right,
        "is_right": is_right and min(again["cached"], hit["cached"]) >= least,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description="One very long prompt, served twice.")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="place for model and SSD; default: temporary")
    parser.add_argument("--memory", default="64MiB", help="of the store: less than the prompt has")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = run(given.tokens, Path(folder), given.memory)
    print(json.dumps(found, indent=1))
    sys.exit(0 if found["is_right"] else 1)


if __name__ == "__main__":
    main()
