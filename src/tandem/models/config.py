"""Settings of the model: what to load and how."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["ModelConfig"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the model that runs: its files, dtype, weight formats and placement."""

    path: Annotated[
        str,
        Meta(
            description="Folder, GGUF file, hub id, or `demo` for the model that ships with Tandem."
        ),
    ] = ""
    revision: Annotated[str, Meta(description="Branch, tag or commit of a hub id.")] = "main"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(
            description="Type of weights and activations; auto decides by size, storage and CPU, "
            "and says why. float16 runs in float32, which holds it."
        ),
    ] = "auto"
    rules: Annotated[
        str, Meta(description="YAML file of placement rules; empty for the built-in ones.")
    ] = ""
    expert_format: Annotated[
        str,
        Meta(
            description="Weight format of routed experts: a name such as int8, int4, bf16 or f32; "
            "none for tensors of the dtype; auto decides and says why."
        ),
    ] = "auto"
    linear_format: Annotated[
        str,
        Meta(
            description="Weight format of all other matrices but the embedding and the routers; "
            "as expert_format."
        ),
    ] = "auto"
    packed_cache: Annotated[
        str,
        Meta(
            description="Folder where packed experts are kept between starts; off for none; auto "
            "keeps those of large models under ~/.cache/tandem."
        ),
    ] = "auto"
    expert_parts: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Shares that packed experts are split into; 0 = one for each NUMA node "
            "that computes. One is mapped from the cache; several are copied to their nodes.",
        ),
    ] = 0
    expert_slots: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="Routed experts of each layer that memory holds while all of them lie on "
            "disk; 0 = all in memory if they fit (engine.memory), else as many as fit.",
        ),
    ] = 0
    expert_policy: Annotated[
        Literal["lru", "segmented-lru", "frequency"],
        Meta(
            description="Which experts keep a slot: lru, those that were computed last; "
            "segmented-lru, first those that were so twice; frequency, those that were so most "
            "often, older uses counting less. `tandem plan --experts` tells which hits most."
        ),
    ] = "lru"
    deferred_experts: Annotated[
        Annotated[int, Meta(ge=0, le=8)] | Literal["auto"],
        Meta(
            description="Routed experts of an answer's token, the least weighted, that are added "
            "one layer later, so that a GPU need not wait for them; changes values. auto: none "
            "without a GPU, else the fewest that keep the CPU busy.",
        ),
    ] = 0
    proof: Annotated[
        Literal["auto", "always", "off"],
        Meta(
            description="Whether an architecture is proved against transformers on a tiny random "
            "model before it is loaded: auto leaves out those that CI proves."
        ),
    ] = "auto"
    adapter: Annotated[
        tuple[str, ...],
        Meta(
            description="LoRA adapters to serve beside the model, each NAME=FOLDER in PEFT's "
            "format; a request chooses one by its name."
        ),
    ] = ()
    adapter_folder: Annotated[
        str,
        Meta(
            description="Folder whose adapters may be loaded while serving, by "
            "/v1/load_lora_adapter; empty: none. That needs server.admin_api_key."
        ),
    ] = ""
    max_adapters: Annotated[
        int, Meta(ge=1, le=4096, description="Adapters that are loaded at a time, by name.")
    ] = 64
    device: Annotated[
        str,
        Meta(
            pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$",
            description="Device of all but routed experts: cpu, or cuda or cuda:N, whose operators "
            "are torch's.",
        ),
    ] = "cpu"
    max_uploads: Annotated[
        Literal[0, 1, 2, 4, 8, 16],
        Meta(
            description="Routed experts of a layer on the host that a decode step uploads to the "
            "device at most, instead of computing them; how many is learnt from the times of both. "
            "0 = none."
        ),
    ] = 4
    device_experts: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="Routed experts of each layer on the host that stay in the memory of the "
            "device as well, so that a decode step computes them there; model.expert_policy "
            "chooses them as they are used, and model.max_uploads brings them. 0 = none.",
        ),
    ] = 0
    stream_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 20)] | Literal["auto"],
        Meta(
            description="Tokens of a step from which routed experts on the host are streamed to "
            "the device layer by layer; 0 = never; auto: from where the cost model predicts that "
            "it is faster."
        ),
    ] = "auto"
    expert_device: Annotated[
        str,
        Meta(
            pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$",
            description="Device of routed experts: cpu, that of the rest of the model, or auto: "
            "cpu, in their weight format.",
        ),
    ] = "auto"
