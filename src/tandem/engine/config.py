"""Settings of an engine instance: memory for KV, batching, scheduling."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.config import SIZE_PATTERN, parse_size
from tandem.core.errors import ConfigError
from tandem.core.spec import KvSharing

__all__ = ["EngineConfig", "KvDtype", "SchedulingOrder"]

SchedulingOrder = Literal["chunked", "prefill_first", "decode_first"]
KvDtype = Literal["auto", "float32", "bfloat16", "int8", "fp8"]
DEFAULT_STEP_TOKENS = 2048


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an engine; a value of 0 is decided when it starts."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens per KV block.")] = 64
    num_kv_blocks: Annotated[
        int, Meta(ge=0, description="KV blocks of the device; 0 = from kv_cache_gib.")
    ] = 0
    kv_cache_gib: Annotated[
        float,
        Meta(ge=0.0, le=2.0**20, description="Memory for KV, GiB; 0 = a share of what is free."),
    ] = 0.0
    num_window_blocks: Annotated[
        int,
        Meta(
            ge=0,
            description="Of a model some of whose layers see a window: blocks of those layers, for "
            "requests and kept ones; 0 = from the memory for KV.",
        ),
    ] = 0
    num_state_slots: Annotated[
        int,
        Meta(
            ge=0,
            description="Of a model whose layers have a state: states of requests and kept ones; "
            "0 = from state_cache_gib.",
        ),
    ] = 0
    state_cache_gib: Annotated[
        float,
        Meta(
            ge=0.0, le=2.0**20, description="Memory for states, GiB; 0 = a share of what is free."
        ),
    ] = 0.0
    state_every: Annotated[
        int,
        Meta(
            ge=0,
            description="A prefill keeps a state at multiples of so many tokens, beside ends of "
            "messages, prompts and answers and where prompts branch; 0 = there alone.",
        ),
    ] = 4096
    memory: Annotated[
        str,
        Meta(
            pattern=SIZE_PATTERN,
            description="Memory of an instance, weights and KV together, such as 16GiB; empty = "
            "what is free. Routed experts that do not fit stay on disk.",
        ),
    ] = ""
    kv_dtype: Annotated[
        KvDtype,
        Meta(
            description="Number format of KV; auto = that of the model's activations. int8 and fp8 "
            "have a scale for each head and token: half of bfloat16's memory, no more speed."
        ),
    ] = "auto"
    latents_in_memory: Annotated[
        str,
        Meta(
            pattern=SIZE_PATTERN,
            description="Of a model with sparse attention (DSA): the latents of all blocks are in "
            "a file of latents_folder, and this much memory, such as 4GiB, is for those that steps "
            "chose lately; memory for KV then is for index keys alone. Empty: all are in memory.",
        ),
    ] = ""
    latents_folder: Annotated[
        str,
        Meta(
            description="Folder of that file, on an SSD; the file has no name and ends with the "
            "process."
        ),
    ] = ""
    kv_sharing: Annotated[
        KvSharing,
        Meta(
            description="relaxed: KV is shared with instances that round differently (another "
            "number of NUMA parts, bf16 instructions of another CPU). strict: it is not, and an "
            "answer is bitwise that of a fresh run on this instruction set, in every dtype and "
            "format (where torch multiplies, format none, excepted), whatever was cached, chunked, "
            "loaded, sent by another instance or recovered."
        ),
    ] = "relaxed"
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            description="Prompt and output tokens of a request; 0 = the model's own, or what fits.",
        ),
    ] = 0
    max_batch_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens per step, shared by decodes and prefill chunks; 0 = the fewest "
            "that reach this machine's prefill speed, as `tandem plan` measured it, or 2048.",
        ),
    ] = 0
    max_running: Annotated[
        int, Meta(ge=1, description="Requests that hold blocks at the same time.")
    ] = 64
    max_queue: Annotated[
        int,
        Meta(ge=0, description="Requests that may wait beyond max_running; more are refused."),
    ] = 256
    scheduling_order: Annotated[
        SchedulingOrder,
        Meta(
            description="chunked: decodes first, prefill chunks fill the step; prefill_first: "
            "whatever can be prefilled goes before decodes; decode_first: decodes run undisturbed."
        ),
    ] = "chunked"
    overlap: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="on: the next step is planned, and the last one's tokens are sent, while a "
            "step runs; auto = on where a device computes beside the CPU."
        ),
    ] = "auto"
    prefix_cache: Annotated[bool, Meta(description="Reuse the KV of prompts that begin alike.")] = (
        True
    )
    max_passover_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86_400.0,
            description="Seconds that a waiting request may be passed over by ones with a longer "
            "cached prefix, or by decodes under decode_first.",
        ),
    ] = 1.0
    expert_trace: Annotated[
        str,
        Meta(
            description="New file for a trace of which experts tokens chose, ids alone, up to "
            "1 GiB; `tandem plan --experts` replays it. Empty: none."
        ),
    ] = ""
    timelines: Annotated[
        int,
        Meta(
            ge=0,
            le=2**20,
            description="Ended requests whose timelines an instance remembers (tandem explain).",
        ),
    ] = 1024
    threads: Annotated[
        int, Meta(ge=0, le=4096, description="Compute threads; 0 = the cores allowed.")
    ] = 0

    @property
    def step_tokens(self) -> int:
        """Token budget of a step: the setting, the planned value, or a default if the machine was
        not measured.
        """
        return self.max_batch_tokens or max(DEFAULT_STEP_TOKENS, self.max_running)

    @property
    def latents_in_memory_bytes(self) -> int:
        """``latents_in_memory`` in bytes; 0 if it is empty."""
        return parse_size(self.latents_in_memory)

    @property
    def memory_bytes(self) -> int:
        """``memory`` in bytes; 0 if it is empty."""
        return parse_size(self.memory)

    def __post_init__(self) -> None:
        """Check that values that are valid one by one are valid together.

        Raises: ConfigError (they are not; ``field`` names the value to change).
        """
        if self.block_size & (self.block_size - 1):
            raise ConfigError(
                "engine.configure",
                f"block_size is {self.block_size}: choose a power of two",
                field="engine.block_size",
            )
        if bool(self.latents_in_memory_bytes) != bool(self.latents_folder):
            missing = "latents_folder" if self.latents_in_memory_bytes else "latents_in_memory"
            raise ConfigError(
                "engine.configure",
                f"latents_in_memory is {self.latents_in_memory or 'empty'!r} and latents_folder is "
                f"{self.latents_folder!r}: a file of latents needs both",
                field=f"engine.{missing}",
            )
        # With a smaller budget the decodes alone could fill every step and starve a started
        # prefill.
        if self.step_tokens < self.max_running:
            raise ConfigError(
                "engine.configure",
                f"max_batch_tokens is {self.max_batch_tokens}, below max_running "
                f"{self.max_running}: every running request needs a token per step",
                field="engine.max_batch_tokens",
            )


class KvEventConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of events about cached blocks; none are published while ``endpoint`` is empty."""

    endpoint: Annotated[
        str,
        Meta(
            description="Address to publish KV events on, such as tcp://127.0.0.1:5557; empty = "
            "none. They carry prompts: loopback, or with kv_events.secret."
        ),
    ] = ""
    replay_endpoint: Annotated[
        str, Meta(description="Address that replays missed KV events; empty = none.")
    ] = ""
    topic: Annotated[str, Meta(max_length=200, description="Topic of the messages.")] = ""
    encoding: Annotated[
        Literal["map", "array"],
        Meta(description="How an event is written: map as vLLM does, array as SGLang does."),
    ] = "map"
    buffer_steps: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Messages remembered for replay.")
    ] = 10_000
    max_unsent: Annotated[
        int, Meta(ge=1, le=10_000_000, description="Messages queued for a slow subscriber.")
    ] = 100_000
    secret: Annotated[
        str | None,
        Meta(
            description="Secret that subscribers prove by CURVE; needed beyond loopback.",
            extra_json_schema={"secret": True},
        ),
    ] = None
