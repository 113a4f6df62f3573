"""Random odd requests: every field of every body, at, within and beyond its bounds.

Fields and bounds are read from the structs that the server decodes, so a new field is tried as soon
as there is one.
"""

import json
import math
import random
import typing
from dataclasses import dataclass

import msgspec
from msgspec import inspect

from tandem.server.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from tandem.server.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tandem.server.protocol.sglang import AbortRequest, GenerateRequest, SglangSampling

__all__ = ["BODY_STRUCTS", "OddRequest", "OddRequests"]

BODY_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort_request": AbortRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}
WEIGHTS = (8, 6, 8, 1, 1, 1, 0.3, 0.3)
"""How often each of them is asked; the first three generate."""
BARE = ("/flush_cache", "/metrics", "/server_info", "/v1/models", "/requests/x/timeline")
TINY = (5e-324, 1e-46, 1e-45, 1.1754943e-38, 1e-7)
HUGE = (1e39, 3e38, 1.7976931348623157e308, 2**63, -(2**63) - 1, 10**40)
TEXTS = ("", " ", "\x00", "\ufeff", "é", "😀" * 9, "def f(x):\n", "<|im_end|>", "a" * 3000, "\\")
MOST_TOKENS = 12
"""A request asks for at most so many tokens, most of the time: many short ones find more."""


@dataclass(frozen=True)
class OddRequest:
    """What is sent, and how far its client reads the answer."""

    method: str
    path: str
    body: bytes
    is_left: bool
    """Whether the client leaves when the answer begins."""


class OddRequests:
    """A source of odd requests.

    Args:
        seed: of all that is drawn.
        models: names that a request may ask for.
        names: ids of other clients' requests, which a request may try to end.
        vocab_size: of the model.
    """

    def __init__(
        self, seed: int, models: typing.Sequence[str], names: typing.Sequence[str], vocab_size: int
    ) -> None:
        self._chance = random.Random(seed)
        self._models, self._names, self._vocab_size = models, names, vocab_size

    def draw(self) -> OddRequest:
        """Return the next request."""
        chance = self._chance
        if chance.random() < 0.02:
            return OddRequest("GET", chance.choice(BARE), b"", False)
        path = chance.choices(list(BODY_STRUCTS), WEIGHTS)[0]
        struct = BODY_STRUCTS[path]
        body = self._draw_struct(struct, chance.choice((1, 1, 2, 4)))
        self._ask(path, struct, body)
        text = json.dumps(body).encode()
        if chance.random() < 0.04:
            text = self._damage(text)
        return OddRequest("POST", path, text, chance.random() < 0.08)

    def _ask(self, path: str, struct: type[msgspec.Struct], body: dict[str, typing.Any]) -> None:
        """Put in what most requests need to be served."""
        chance = self._chance
        if "model" in struct.__struct_fields__ and chance.random() < 0.9:
            body["model"] = chance.choice(self._models)
        if struct is GenerateRequest:
            body.pop(chance.choice(("text", "input_ids")), None)
            if not {"text", "input_ids"} & body.keys():
                body[chance.choice(("text", "input_ids"))] = self._draw_prompt()
            sampling = body.get("sampling_params")
            if sampling is None or (isinstance(sampling, list) and chance.random() < 0.8):
                sampling = body["sampling_params"] = self._draw_struct(SglangSampling, 2)
            if isinstance(sampling, dict) and chance.random() < 0.9:
                sampling["max_new_tokens"] = chance.randint(0, MOST_TOKENS)
                sampling["n"] = chance.choice((1, 1, 1, 2, 5))
        elif struct in (ChatRequest, CompletionRequest):
            if chance.random() < 0.9:
                body["max_tokens"] = chance.randint(0, MOST_TOKENS)
                body["n"] = chance.choice((1, 1, 1, 2, 5, 40))
            if struct is CompletionRequest and chance.random() < 0.9:
                body["prompt"] = self._draw_prompt()
            if struct is ChatRequest and chance.random() < 0.9:
                content = chance.choice(TEXTS)
                roles = ("system", "user", "assistant")
                body["messages"] = [
                    {"role": chance.choice(roles), "content": content}
                    for _ in range(chance.choice((1, 2, 7)))
                ]
        elif struct is AbortRequest and chance.random() < 0.7:
            body["rid"] = chance.choice(self._names)

    def _draw_prompt(self) -> typing.Any:
        chance = self._chance
        length = chance.choice((0, 1, 2, 15, 16, 17, 64, 130, 600))
        edges = (0, 1, 2, self._vocab_size - 1, self._vocab_size, self._vocab_size + 1)
        ids = [chance.randrange(self._vocab_size) for _ in range(length)]
        if chance.random() < 0.2:
            ids.append(chance.choice(edges))
        kind = chance.random()
        if kind < 0.4:
            return "".join(chance.choices(TEXTS, k=chance.choice((1, 1, 3))))
        if kind < 0.8:
            return ids
        return [ids] * chance.choice((1, 2, 20)) if kind < 0.9 else list(TEXTS)

    def _draw_struct(self, struct: type[msgspec.Struct], count: int) -> dict[str, typing.Any]:
        chance = self._chance
        fields = inspect.type_info(struct).fields
        body = {f.encode_name: self._draw_value(f.type) for f in fields if f.required}
        for each in chance.sample(fields, min(count, len(fields))):
            body[each.encode_name] = self._draw_value(each.type)
        return body

    def _draw_value(self, kind: inspect.Type) -> typing.Any:
        """Return a value of a type, seldom one of another."""
        chance = self._chance
        if chance.random() < 0.02:
            return self._draw_any(2)
        match kind:
            case inspect.UnionType(types=types):
                return self._draw_value(chance.choice(types))
            case inspect.IntType() | inspect.FloatType():
                return self._draw_number(kind)
            case inspect.StrType():
                return chance.choice((*TEXTS, *self._names, *self._models, "x" * 5000))
            case inspect.BoolType():
                return chance.random() < 0.5
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                return [self._draw_value(item) for _ in range(chance.choice((0, 1, 2, 5, 70)))]
            case inspect.DictType(value_type=value):
                keys = (chance.randrange(self._vocab_size + 2) for _ in range(9))
                return {str(key): self._draw_value(value) for key in keys}
            case inspect.StructType(cls=cls):
                return self._draw_struct(cls, 2)
            case inspect.LiteralType(values=values):
                return chance.choice(values)
            case inspect.NoneType():
                return None
            case _:
                return self._draw_any(3)

    def _draw_number(self, kind: inspect.IntType | inspect.FloatType) -> float:
        chance = self._chance
        bounds = [b for b in (kind.ge, kind.gt, kind.le, kind.lt) if b is not None]
        low, high = min(bounds, default=0), max(bounds, default=1)
        if isinstance(kind, inspect.IntType):
            edges = [n + d for n in (*bounds, 0, 1) for d in (-1, 0, 1)]
            inside = chance.randint(int(low), int(high))
            return chance.choice([*edges, *[inside] * 9, chance.choice(HUGE)])
        edges = [math.nextafter(n, to) for n in (*bounds, 0.0, 1.0) for to in (-math.inf, math.inf)]
        inside = chance.uniform(low, high)
        tiny = chance.choice(TINY) * chance.choice((1, -1))
        return chance.choice([*bounds, *edges, *[inside] * 9, tiny, chance.choice(HUGE)])

    def _draw_any(self, depth: int) -> typing.Any:
        chance = self._chance
        kind = chance.randrange(8 if depth else 6)
        if kind == 6:
            return [self._draw_any(depth - 1) for _ in range(3)]
        if kind == 7:
            return {chance.choice(TEXTS): self._draw_any(depth - 1) for _ in range(3)}
        plain = (None, True, chance.choice(HUGE), chance.choice(TINY), chance.randint(-3, 9))
        return (*plain, chance.choice(TEXTS))[kind]

    def _damage(self, text: bytes) -> bytes:
        chance = self._chance
        at = chance.randrange(len(text) + 1)
        return chance.choice(
            (
                text[:at],
                text[:at] + bytes([chance.randrange(256)]) + text[at:],
                b"[" * 5000 + text,
                text.replace(b'"', b"'"),
                text[:-1] + b', "prompt": NaN}',
                text[:-1] + b', "stop": "\\ud800"}',
                b"\xff" * at,
                text + b" " * 200_000,
            )
        )
