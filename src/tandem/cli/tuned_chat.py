"""``tandem chat --adapter``: a conversation with an adapter, in this process."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tandem.cli.extras import require_extra
from tandem.cli.terminal_input import make_reader

__all__ = ["chat_tuned"]


def chat_tuned(
    model: str,
    adapter: Path,
    *,
    prompts: list[str] | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    json: bool,
) -> None:
    """Answer the prompts, or what is typed, with a model and its adapter."""
    require_extra("finetune", "peft")
    from tandem.finetune.tuned import TunedModel

    tuned = TunedModel(model, adapter)
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    turns: Iterator[str] = iter(make_reader(), None) if prompts is None else iter(prompts)
    for text in turns:
        if prompts is None and text in ("/exit", "/clear"):
            if text == "/exit":
                break
            messages = list(start)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        answer = tuned.answer(messages, max_tokens=max_tokens, temperature=temperature, seed=seed)
        messages.append({"role": "assistant", "content": answer})
        if json:
            sys.stdout.buffer.write(msgspec.json.encode({"text": answer}) + b"\n")
            sys.stdout.flush()
        else:
            sys.stdout.write(f"{answer}\n")
