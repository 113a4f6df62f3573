"""Messages between the API server and an engine instance.

Everything here crosses ``tandem.rpc`` as msgpack; nothing here knows of HTTP or of tensors. Text
never crosses: the server owns the tokenizer, the instance sees token ids alone. Stop *strings*
are therefore the server's business, stop *ids* the instance's.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.core.adapter import AdapterInfo
from tandem.core.kv_identity import KvIdentity
from tandem.core.kv_layout import KVLayout

__all__ = [
    "GROWTH_BLOCKS",
    "MIN_REPETITION_PENALTY",
    "NO_SLO",
    "WIRE_VERSION",
    "AddRequest",
    "BlockChanges",
    "CancelRequest",
    "ClosePeer",
    "Continuation",
    "ContinueRequest",
    "Empty",
    "FinishReason",
    "InstanceInfo",
    "InstanceLoad",
    "InstanceStage",
    "KvHandle",
    "KvPeer",
    "KvSource",
    "NoKv",
    "PlacedLayers",
    "PlacedPart",
    "Pooling",
    "PrefillKv",
    "PromptLogprobs",
    "ReleaseHold",
    "RequestOutput",
    "SamplingParams",
    "Slo",
    "StageChanged",
    "StepOutputs",
    "StepRecord",
    "TierKv",
    "TokenLogprob",
]

WIRE_VERSION = 9
"""Version of these messages; an instance and a server of different versions refuse each other."""


GROWTH_BLOCKS = 2
"""Blocks of KV beyond its known tokens that a request which decodes is said to need."""
MIN_REPETITION_PENALTY = 1e-6
"""Logits are divided by it in float32, where much smaller values are 0 or give infinities."""


class Pooling(StrEnum):
    """The vector that a request wants of its prompt, instead of tokens."""

    LAST = "last"
    """The last token's hidden state, behind the final norm."""
    MEAN = "mean"
    """The mean of all tokens' hidden states."""
    SCORE = "score"
    """The labels' logits, of a model with a head that classifies."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The settings by which the tokens of one request are chosen; bounds are checked where it is
    decoded.
    """

    max_tokens: Annotated[int, Meta(ge=0)] = 16
    """Tokens to generate at most; 0 computes the prompt alone (for its log-probabilities)."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Stop ids and end-of-text are not sampled before this many tokens."""
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    """0 is all."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=10.0)] = 1.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: dict[int, float] = {}
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """The random stream depends on seed and position alone; None draws a fresh seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end-of-text ids."""
    ignore_eos: bool = False
    """With a grammar, the model's end of text ends the request all the same."""
    grammar: str = ""
    """The grammar that the output must match, as llguidance's JSON; empty: anything. Its own end
    comes before ``min_tokens``."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """None: none. k: the chosen token's log-probability and those of the k likeliest."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """The same for the prompt's tokens; switches reuse of a cached prefix off."""

    pooling: Pooling | None = None
    """None: tokens are generated; else ``max_tokens`` is 0."""

    @property
    def needs_whole_prompt(self) -> bool:
        """True if each token of the prompt gives a part of the output, so that none is reused."""
        return self.prompt_logprobs is not None or self.pooling is Pooling.MEAN

    @property
    def has_penalties(self) -> bool:
        """True if tokens seen so far change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


class KvHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that a prefill instance holds for the decode instance."""

    request_id: str
    """Id of the request there, by which the hold is released."""
    block_ids: tuple[int, ...] = ()
    """By position in the prompt; empty while the prefill runs, which then announces them."""
    num_tokens: int
    """Tokens whose KV is in the blocks: all of the prompt."""
    lease_s: Annotated[float, Meta(gt=0.0, le=3600.0)]
    """Seconds, from when this was sent, during which the blocks stay as they are."""


class NoKv(msgspec.Struct, frozen=True, tag="none"):
    """KV is computed, unless the instance's own blocks hold it."""


class TierKv(msgspec.Struct, frozen=True, tag="tiers"):
    """KV may come from the lower tiers of the instance."""


class PrefillKv(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """KV comes from an instance that prefills the same prompt; what does not come is computed."""

    instance: str
    """Name of the prefill instance."""
    handle: KvHandle


KvSource = NoKv | TierKv | PrefillKv
"""The source that the KV of a prompt may come from, beside the instance's own blocks."""


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """The point at which a generation of another instance goes on."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    """Output so far; not sent again."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    """Seed of the random stream, concrete: with the position, all that the sampler remembers."""


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives of one request."""

    ttft_s: Annotated[float, Meta(gt=0.0)] | None = None
    """Seconds from arrival to the first token; None: as it comes."""
    tpot_s: Annotated[float, Meta(gt=0.0)] | None = None
    """Mean seconds of each later token."""


NO_SLO = Slo()


class AddRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Start one generation; its tokens arrive as ``RequestOutput`` events."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    """Lower is served first."""
    timeout_s: float | None = None
    """Seconds from arrival after which the request ends with ``FinishReason.DEADLINE``."""
    client: str = ""
    """The client that sent it, in the server's words: different clients that wait get equal
    shares."""
    weight: Annotated[float, Meta(gt=0.0)] = 1.0
    """The weight of its client's share, beside those of others."""
    slo: Slo = NO_SLO
    """Decides about its acceptance; of no concern to instances."""
    cache_salt: str = ""
    """Requests of different salts never share cached blocks."""
    adapter: str = ""
    """``AdapterInfo.digest`` of the LoRA adapter that computes it; empty is the model alone. An
    instance without it refuses the request."""
    kv_source: KvSource = TierKv()
    prefill_lease_s: Annotated[float, Meta(gt=0.0, le=3600.0)] | None = None
    """Not None: end with the first token and ``FinishReason.PREFILLED``, unless that token ends the
    request anyway, and hold the blocks for so many seconds or until ``ReleaseHold``."""
    continuation: Continuation | None = None
    """Go on after these tokens instead of sampling the first one."""
    message_end: int = 0
    """Tokens of the prompt up to the end of its last message, without what asks for an answer; a
    model with states keeps one there. 0: unknown."""
    pin_len: Annotated[int, Meta(ge=0)] = 0
    """Leading tokens of the prompt whose KV the store is to evict late; see ``pin_s``."""
    pin_s: Annotated[float, Meta(ge=0.0, le=86400.0)] = 0.0
    """Seconds for which it is; each client may have so many pins only."""
    awaits_continuation: bool = False
    """With ``PrefillKv``: load the blocks, but do not compute before ``ContinueRequest`` comes or
    the lease has ended."""
    expected_len: int = 0
    """Tokens of the prompt whose KV the server believes to be there; they count as no load while
    the request waits. Nothing else depends on it."""
    number: int = 0
    """Number among those that this server sends this instance, from 1; see ``InstanceLoad``. 0:
    none."""


class ContinueRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Give a request that awaits it its continuation.

    The reply is False if the request is not live or has begun to compute, its first token included.
    """

    request_id: str
    continuation: Continuation


class ReleaseHold(msgspec.Struct, frozen=True, kw_only=True, tag="release_hold"):
    """Event: the blocks of a prefill have been read; unknown ids are ignored, as the lease may
    just have ended.
    """

    request_id: str


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_request"):
    """Event: stop a generation; unknown ids are ignored, as it may just have ended."""

    request_id: str


class Empty(msgspec.Struct, frozen=True):
    """The reply or argument of calls that carry nothing."""


class FinishReason(StrEnum):
    """Why a generation ended; every accepted request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    PREFILLED = "prefilled"
    """A request that only prefills has its first token, and its blocks are held."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of a token under the model before penalties and truncation."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    """The likeliest tokens and their log-probabilities, best first."""


_logprobs_decoder = msgspec.msgpack.Decoder(list[TokenLogprob | None])


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of a prompt, encoded.

    A long prompt has a million: the event loop hands them on as they are, and a thread decodes
    them.
    """

    num_tokens: int
    num_top: int
    """Likeliest tokens beside each."""
    data: bytes

    @classmethod
    def pack(cls, entries: Sequence[TokenLogprob | None], num_top: int) -> "PromptLogprobs":
        """Encode the log-probabilities of a prompt's tokens; the first has none."""
        return cls(len(entries), num_top, msgspec.msgpack.encode(entries))

    def unpack(self) -> list[TokenLogprob | None]:
        """Decode them; O(tokens)."""
        return _logprobs_decoder.decode(self.data)


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """The output of one engine step for one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    prompt_len: int = 0
    """Tokens of the prompt; in the first output and the last."""
    cached_len: int = 0
    """Tokens of the prompt whose KV was found in the prefix cache; where ``prompt_len`` is."""
    queue_s: float | None = None
    """Seconds from acceptance to the first step that computed some of it; with ``prompt_len``."""
    logprobs: list[TokenLogprob] | None = None
    """If asked for: one for each of ``token_ids``, then one for ``stop_token_id`` where it is."""
    prompt_logprobs: PromptLogprobs | None = None
    """In the first output, if asked for; the first token of a prompt has none."""
    stop_token_id: int | None = None
    """The id that ended the request, if one did; it is not among ``token_ids``."""
    pooled: bytes | None = None
    """With the end of a request that wants a vector: float32, little-endian."""
    error_code: str | None = None
    error_text: str | None = None
    kv_handle: KvHandle | None = None
    """With ``FinishReason.PREFILLED``; ``continuation`` too."""
    continuation: Continuation | None = None
    """For the client's eyes: without the name of the operation that failed."""


class InstanceLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load of an instance at one moment, for whoever chooses among instances."""

    version: int = 0
    """Version of the report: the greater of two is of the later moment; 0: nothing has been
    told."""
    num_received: int = 0
    """The greatest ``AddRequest.number`` of this server's that has arrived; calls arrive in the
    order in which they were sent."""
    pending: tuple[int, ...] = ()
    """Those up to it that are still being taken in, and not contained in what follows."""
    queued_tokens: int = 0
    """Known tokens of requests that it has to compute before they decode."""
    num_decoding: int = 0
    """Requests that decode here, or will."""
    free_blocks: int = 0
    """Blocks of KV that its requests do not need, ``GROWTH_BLOCKS`` for each that decodes included;
    may be negative. What requests share is counted for each."""
    largest_blocks: int = 0
    """Blocks of the longest request that decodes, at its full length."""
    queued_context: float = 0.0
    """The sum of the lengths that each of the queued tokens will attend to."""
    decode_tokens: int = 0
    """KV tokens of the requests that decode here, or will."""
    num_requests: int = 0
    """Requests that are live here."""
    load_tokens_per_s: float = 0.0
    """KV that it loads from the store, as measured lately; 0: nothing was loaded."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step that was computed, for estimates of later ones."""

    prefill_tokens: int
    prefill_context: float
    """Sum over these tokens of the length that each attends to."""
    num_decodes: int
    decode_tokens: int
    """KV tokens that the decodes read."""
    seconds: float


class BlockChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes of the full blocks that can be found in an instance, by the heads of their keys.

    A head is the first eight bytes of a block's key as a little-endian number. Changes of one
    block between two messages are summed up in its last state.
    """

    stored: list[int] = []
    removed: list[int] = []
    in_store: list[int] = []
    """Blocks that this instance has put into the store, or found there."""
    lost_in_store: list[int] = []
    """Blocks that it looked for there in vain."""
    is_reset: bool = False
    """Whatever was told before is void; ``stored`` is all there is."""
    group_stored: list[int] = []
    """Blocks that now have the KV of the layers with a window, or behind which a state is kept;
    empty of other models. See ``InstanceInfo.group_depth``."""
    group_removed: list[int] = []


class StepOutputs(msgspec.Struct, frozen=True, tag="step_outputs"):
    """Event: the outputs of one engine step, none if an idle instance has only its load to tell."""

    outputs: list[RequestOutput]
    load: InstanceLoad | None = None
    """None: it was told a moment ago, or has not changed."""
    steps: list[StepRecord] = []
    """Those since they were told last, but for the oldest of very many."""
    blocks: BlockChanges | None = None
    """None: there is no change, or nobody wants to know."""


class InstanceStage(StrEnum):
    """The stage of an instance; ``/ready`` shows it."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    """It has no process until it is woken."""
    FAILED = "failed"


class StageChanged(msgspec.Struct, frozen=True, tag="stage_changed"):
    """Event: an instance entered a stage, or came further within one."""

    stage: InstanceStage
    detail: str = ""
    done: int = 0
    total: int = 0
    """Units of work done of those in this stage, for a progress bar; 0 of 0 is unknown."""


class KvPeer(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses and layout of an instance's blocks, for its readers."""

    name: str
    """Name of the instance, as ``PrefillKv.instance`` has it."""
    addresses: tuple[str, ...]
    """Addresses of its transfer engine, ``host:port``."""
    epoch: int
    """Epoch of its transfer engine: another one after a restart."""
    identity: KvIdentity
    """Identity of the whole model."""
    layout: KVLayout
    """Layout of its blocks: of a rank of tensor parallelism, with the rank's heads alone."""
    first_head: Annotated[int, Meta(ge=0)] = 0
    """The first of the model's KV heads that its blocks hold."""
    block_bytes: Annotated[int, Meta(ge=1)]
    num_blocks: Annotated[int, Meta(ge=1)]
    buffer: str
    """Name of the registered memory that holds all its blocks, one after the other."""
    state_buffer: str = ""
    """The same of its slots of states; empty where the model has no state."""
    state_bytes: Annotated[int, Meta(ge=0)] = 0
    num_state_slots: Annotated[int, Meta(ge=0)] = 0
    window_buffer: str = ""
    """The same of its blocks of layers with a window; empty where these have none of their own."""
    window_block_bytes: Annotated[int, Meta(ge=0)] = 0
    num_window_blocks: Annotated[int, Meta(ge=0)] = 0


class ClosePeer(msgspec.Struct, frozen=True):
    """Drop an instance whose blocks were read; reads in progress end without content."""

    name: str


class PlacedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The matrices of one role in a layer: where they are kept, and how."""

    role: str
    """The same as ``MatrixPlan.role`` has it."""
    device: str
    weight_format: str
    size_bytes: int


class PlacedLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring layers whose matrices are kept alike."""

    first: int
    """Index of the first; -1: matrices that belong to no layer."""
    num_layers: int
    kind: str
    """For people: the mixer, and what follows it."""
    parts: list[PlacedPart]
    """Parts of one layer."""


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a running instance: all values concrete, fixed while it lives."""

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_batch_tokens: int = 1
    """Tokens of one step at most."""
    group_depth: int = 0
    """Last blocks of a prefix that must be in ``BlockChanges.group_stored`` for a request to go on
    from there: those of the window, or the one before the state; 0: blocks alone suffice."""
    kv_bytes_per_token: int
    weight_bytes: int
    num_parameters: int
    eos_token_ids: list[int]
    weight_version: str
    """SHA-256 over all bytes of the weights, hex."""
    system_fingerprint: str
    """See ``KvIdentity.system_fingerprint``."""
    kv_identity: str
    """``KvIdentity.digest``, hex: instances with another one are another model to a client, so one
    answer never has tokens of both."""
    pid: int
    load_seconds: float
    hidden_size: int = 0
    """Numbers of a token's hidden state."""
    num_labels: int = 0
    """Labels of a model that classifies; 0: it generates."""
    max_model_len_reason: str = ""
    """Why the context is so long."""
    adapters: list[AdapterInfo] = []
    """Those of ``InstanceSpec.adapters`` that were loaded at the start."""
    adapter_failures: dict[str, str] = {}
    """Why the others were not, by name."""
    num_state_slots: int = 0
    """Slots for states of sequences and snapshots of them; 0: the model has no state."""
    state_bytes: int = 0
    """Bytes of one state."""
    num_window_blocks: int = 0
    """Blocks of layers with a window; 0: these have none of their own."""
    window_block_bytes: int = 0
    """Bytes of one such block."""
    kv_peer: KvPeer | None = None
    """The address at which others read its blocks; None: it takes no part in disaggregation, or
    only reads."""
    plan: list[tuple[str, str, str]] = []
    """Choices for this machine, each with its value and reason, as `tandem plan` has them."""
    rejected: list[tuple[str, str, str]] = []
    """Alternatives that were rejected, and why."""
    placement: list[PlacedLayers] = []
    """The layers, by where their matrices are kept."""
    packed_folders: list[str] = []
    """Folders on its machine that packed weights are mapped from."""
