"""Messages between the API server and an engine instance.

They are sent over ``tandem.rpc`` as msgpack and know nothing of HTTP or tensors. They have token
ids and no text: the server owns the tokenizer. So the server handles stop *strings*, and the
instance stop *ids*.
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
"""Version of the messages between a server and an instance; two with different versions do not
connect."""


GROWTH_BLOCKS = 2
"""Number of KV blocks, beyond those of its known tokens, that a decoding request is assumed to
need.
"""
MIN_REPETITION_PENALTY = 1e-6
"""Smallest repetition penalty. Logits are divided by it in float32, where much smaller values are 0
or give infinities."""


class Pooling(StrEnum):
    """The vector that a request asks for instead of generated tokens."""

    LAST = "last"
    """The last token's hidden state, after the final norm."""
    MEAN = "mean"
    """The mean of all tokens' hidden states."""
    SCORE = "score"
    """The logits of the labels, for a classification model."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the choice of tokens for one request. Their bounds are checked when it is
    decoded.
    """

    max_tokens: Annotated[int, Meta(ge=0)] = 16
    """Largest number of tokens to generate; 0: only compute the prompt, for its
    log-probabilities."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Number of tokens before which no stop id or end-of-text is sampled."""
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    """Temperature of sampling; 0: greedy."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Number of likeliest tokens to sample from; 0: all."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=10.0)] = 1.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: dict[int, float] = {}
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Seed of the random stream, which depends on seed and position alone; None: a random one."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request, in addition to the model's own end-of-text ids."""
    ignore_eos: bool = False
    """True if the model's end-of-text ids do not end the request; without effect if it has a
    grammar."""
    grammar: str = ""
    """Grammar that the output must match, as llguidance's JSON; empty: none. The request ends with
    the grammar, even before ``min_tokens``."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Number of likeliest tokens to report, beside the chosen one, with log-probabilities; None: no
    log-probabilities are reported."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Number of likeliest tokens to report with log-probabilities for each prompt token; None: none
    are reported. No cached prefix is reused then."""

    pooling: Pooling | None = None
    """Kind of vector wanted, with ``max_tokens`` 0; None: tokens are generated."""

    @property
    def needs_whole_prompt(self) -> bool:
        """True if every prompt token must be computed, for example for its log-probability, so that
        no cached prefix is reused.
        """
        return self.prompt_logprobs is not None or self.pooling is Pooling.MEAN

    @property
    def has_penalties(self) -> bool:
        """True if a penalty makes earlier tokens affect the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


class KvHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The reference to blocks that a prefill instance keeps for a decode instance to read."""

    request_id: str
    """Id of the request at the prefill instance, by which the blocks are released."""
    block_ids: tuple[int, ...] = ()
    """Block ids by position in the prompt; empty while the prefill runs, which then announces
    them."""
    num_tokens: int
    """Number of tokens with KV in the blocks: the whole prompt."""
    lease_s: Annotated[float, Meta(gt=0.0, le=3600.0)]
    """Seconds from the sending of this message for which the blocks are kept."""


class NoKv(msgspec.Struct, frozen=True, tag="none"):
    """The KV source "none": blocks that the instance lacks are computed."""


class TierKv(msgspec.Struct, frozen=True, tag="tiers"):
    """The KV source "lower tiers": blocks that the instance lacks are loaded from the store, if
    they are there.
    """


class PrefillKv(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """The KV source "prefill instance", which computes the same prompt; blocks that do not arrive
    are computed here.
    """

    instance: str
    """Name of the prefill instance."""
    handle: KvHandle


KvSource = NoKv | TierKv | PrefillKv
"""Source of a prompt's KV, beside the instance's own blocks."""


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """The state from which a generation begun by another instance goes on."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    """Output so far, which is not sent to the client again."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    """Seed of the random stream as a number; with the position, it is the whole state of the
    sampler."""


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Latency objectives of one request."""

    ttft_s: Annotated[float, Meta(gt=0.0)] | None = None
    """Seconds from arrival to the first token; None: no objective."""
    tpot_s: Annotated[float, Meta(gt=0.0)] | None = None
    """Mean seconds per later token; None: no objective."""


NO_SLO = Slo()


class AddRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to begin one generation; its tokens arrive as ``RequestOutput`` events."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    """Priority; a lower number is served first."""
    timeout_s: float | None = None
    """Seconds from arrival after which the request ends with ``FinishReason.DEADLINE``."""
    client: str = ""
    """Name of the client that sent it; waiting requests of different clients get shares by
    weight."""
    weight: Annotated[float, Meta(gt=0.0)] = 1.0
    """Weight of its client's share, relative to other clients."""
    slo: Slo = NO_SLO
    """Latency objectives, used by the server for admission; instances ignore them."""
    cache_salt: str = ""
    """Salt; requests with different salts never share cached blocks."""
    adapter: str = ""
    """``AdapterInfo.digest`` of the LoRA adapter; empty: the model alone. An instance without that
    adapter refuses the request."""
    kv_source: KvSource = TierKv()
    prefill_lease_s: Annotated[float, Meta(gt=0.0, le=3600.0)] | None = None
    """If not None, the request ends with its first token and ``FinishReason.PREFILLED`` (unless
    that token ends it anyway), and its blocks are held for so many seconds or until
    ``ReleaseHold``."""
    continuation: Continuation | None = None
    """Tokens after which it goes on, instead of sampling the first one."""
    message_end: int = 0
    """Number of prompt tokens up to the end of its last message, without the tokens that open the
    answer. A model with recurrent states keeps a snapshot there. 0: unknown."""
    pin_len: Annotated[int, Meta(ge=0)] = 0
    """Number of leading prompt tokens whose KV the store is to evict late; see ``pin_s``."""
    pin_s: Annotated[float, Meta(ge=0.0, le=86400.0)] = 0.0
    """Seconds for which the store is to evict them late; the number of pins of a client is
    limited."""
    awaits_continuation: bool = False
    """Used with ``PrefillKv``: True if the instance should load the blocks, but compute nothing
    before ``ContinueRequest`` comes or the lease on the blocks has ended.
    """
    expected_len: int = 0
    """Number of prompt tokens that the server expects to be cached. They do not count as load while
    the request waits; nothing else depends on it."""
    number: int = 0
    """Number of the request among those that this server sends to this instance, from 1; see
    ``InstanceLoad``. 0: none."""


class ContinueRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of the prefill instance, for a request with ``awaits_continuation``, which waits
    for them to go on.

    The reply is False if the request is not live or has already begun to compute.
    """

    request_id: str
    continuation: Continuation


class ReleaseHold(msgspec.Struct, frozen=True, kw_only=True, tag="release_hold"):
    """Event: the blocks that an instance holds for an ended prefill have been read. Unknown ids are
    ignored, as after the end of the hold's lease.
    """

    request_id: str


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_request"):
    """Event: stop a generation. Unknown ids are ignored, because it may just have ended."""

    request_id: str


class Empty(msgspec.Struct, frozen=True):
    """An argument or reply without content."""


class FinishReason(StrEnum):
    """The reason why a generation ended; every accepted request ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    PREFILLED = "prefilled"
    """A prefill-only request has its first token, and its blocks are held."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log-probability of a token, by the model's logits before penalties and truncation."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    """The likeliest tokens with their log-probabilities, likeliest first."""
    rank: int = 0
    """Rank of the token among all, 1 for the likeliest; 0 if it was not counted."""


_logprobs_decoder = msgspec.msgpack.Decoder(list[TokenLogprob | None])


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log-probabilities of a prompt's tokens, in encoded form.

    A long prompt has a million tokens. So the event loop passes the bytes on, and a thread decodes
    them.
    """

    num_tokens: int
    num_top: int
    """Number of likeliest tokens reported for each position."""
    data: bytes

    @classmethod
    def pack(cls, entries: Sequence[TokenLogprob | None], num_top: int) -> "PromptLogprobs":
        """Encode the log-probabilities of a prompt's tokens; that of the first is None."""
        return cls(len(entries), num_top, msgspec.msgpack.encode(entries))

    def unpack(self) -> list[TokenLogprob | None]:
        """Decode the log-probabilities, one entry a token; None for the first, which nothing
        predicts. O(tokens).
        """
        return _logprobs_decoder.decode(self.data)


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """The output of one engine step for one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    prompt_len: int = 0
    """Number of tokens of the prompt; in the first and the last output."""
    cached_len: int = 0
    """Number of prompt tokens found in the prefix cache; in the first and the last output."""
    queue_s: float | None = None
    """Seconds from acceptance to the first step that computed some of it; in the first and last
    output."""
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities, if asked for: one for each of ``token_ids``, then one for
    ``stop_token_id`` if there is one."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt's tokens, if asked for; in the first output."""
    stop_token_id: int | None = None
    """Id of the token that ended the request, which is not in ``token_ids``; None: none did."""
    pooled: bytes | None = None
    """Vector that the request asked for, as float32, little-endian; in the last output."""
    error_code: str | None = None
    error_text: str | None = None
    """Text of the error for the client, without the name of the operation that failed."""
    kv_handle: KvHandle | None = None
    """Reference to the held blocks; only with ``FinishReason.PREFILLED``."""
    continuation: Continuation | None = None
    """Output so far and seed, from which a decode instance continues; only with
    ``FinishReason.PREFILLED``."""


class InstanceLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load of an instance at one time (queued tokens, running decodes, blocks), by which
    instances are compared.
    """

    version: int = 0
    """Version of the report; later reports have greater ones. 0: no report yet."""
    num_received: int = 0
    """Largest ``AddRequest.number`` received from this server; calls arrive in the order of
    sending."""
    pending: tuple[int, ...] = ()
    """Numbers, up to ``num_received``, of requests that are still being added and are not in this
    load."""
    queued_tokens: int = 0
    """Number of tokens to compute before their requests decode."""
    num_decoding: int = 0
    """Number of requests that decode here, or will."""
    free_blocks: int = 0
    """Number of KV blocks that its requests do not need, with ``GROWTH_BLOCKS`` counted for each
    decoding one. May be negative, because shared blocks count once for each request."""
    largest_blocks: int = 0
    """Number of blocks of the longest decoding request at its full length."""
    queued_context: float = 0.0
    """Sum over the queued tokens of the number of tokens that each will attend to."""
    decode_tokens: int = 0
    """Number of KV tokens of the requests that decode here, or will."""
    num_requests: int = 0
    """Number of requests at this instance that have not ended."""
    load_tokens_per_s: float = 0.0
    """Measured rate of loading KV from the store, in tokens per second; 0: nothing was loaded."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The work and duration of a completed step, from which later durations are estimated."""

    prefill_tokens: int
    prefill_context: float
    """Sum over the prefilled tokens of the number of tokens that each attends to."""
    num_decodes: int
    decode_tokens: int
    """Number of KV tokens that the decodes read."""
    seconds: float


class BlockChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes of the full blocks cached at an instance, by truncated key.

    A truncated key is the first eight bytes of a block's key as a little-endian number. Several
    changes of one block between two messages are sent as the last one.
    """

    stored: list[int] = []
    removed: list[int] = []
    in_store: list[int] = []
    """Blocks that this instance has stored in the store, or found there."""
    lost_in_store: list[int] = []
    """Blocks that this instance looked up in the store and did not find."""
    is_reset: bool = False
    """True if all earlier messages are void, and ``stored`` has all present blocks."""
    group_stored: list[int] = []
    """Blocks at whose end the window or a state is now cached; empty for models without these. See
    ``InstanceInfo.group_depth``."""
    group_removed: list[int] = []


class StepOutputs(msgspec.Struct, frozen=True, tag="step_outputs"):
    """Event: the outputs of one engine step; empty if an idle instance only reports its load."""

    outputs: list[RequestOutput]
    load: InstanceLoad | None = None
    """Load of the instance; None if it was sent a moment ago, or has not changed."""
    steps: list[StepRecord] = []
    """Steps since the last report; if there are very many, the oldest are left out."""
    blocks: BlockChanges | None = None
    """Changes of cached blocks; None: no change, or not to be reported."""


class InstanceStage(StrEnum):
    """The stage of an instance (starting, loading, ready, ...), which ``/ready`` shows."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    """The instance has no process until it is woken."""
    FAILED = "failed"


class StageChanged(msgspec.Struct, frozen=True, tag="stage_changed"):
    """Event: an instance entered a stage, or progressed within one."""

    stage: InstanceStage
    detail: str = ""
    done: int = 0
    total: int = 0
    """Units of work in this stage, of which ``done`` are done, for a progress bar; 0: unknown."""


class KvPeer(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses and layout of an instance's blocks, for instances that read them."""

    name: str
    """Name of the instance, as ``PrefillKv.instance`` has it."""
    addresses: tuple[str, ...]
    """Addresses of its transfer engine, ``host:port``."""
    epoch: int
    """Number of the run of the instance's transfer engine; it differs after a restart."""
    identity: KvIdentity
    """KV identity of the whole model."""
    layout: KVLayout
    """Layout of its blocks; with tensor parallelism, they have the heads of one rank."""
    first_head: Annotated[int, Meta(ge=0)] = 0
    """Index in the model of the first KV head that its blocks have."""
    block_bytes: Annotated[int, Meta(ge=1)]
    num_blocks: Annotated[int, Meta(ge=1)]
    buffer: str
    """Name of the registered buffer with all its blocks, one after the other."""
    state_buffer: str = ""
    """Name of the registered buffer with all its state slots; empty if the model has no state."""
    state_bytes: Annotated[int, Meta(ge=0)] = 0
    num_state_slots: Annotated[int, Meta(ge=0)] = 0
    window_buffer: str = ""
    """Name of the registered buffer with all its window blocks; empty if it has none."""
    window_block_bytes: Annotated[int, Meta(ge=0)] = 0
    num_window_blocks: Annotated[int, Meta(ge=0)] = 0


class ClosePeer(msgspec.Struct, frozen=True):
    """A request to disconnect from an instance whose blocks were read; reads in progress fail."""

    name: str


class PlacedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The storage of the matrices of one role in a layer: device, format and size."""

    role: str
    """Role of the matrices, as ``MatrixPlan.role``."""
    device: str
    weight_format: str
    size_bytes: int


class PlacedLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive layers whose matrices are stored in the same way."""

    first: int
    """Index of the first layer; -1: matrices outside the layers."""
    num_layers: int
    kind: str
    """Kind of the layers in words: the token mixer, then MLP or experts."""
    parts: list[PlacedPart]
    """Memory and device of the matrices of one of these layers, which are all alike."""


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a running instance: concrete values, fixed as long as it runs."""

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_batch_tokens: int = 1
    """Largest number of tokens of one step."""
    group_depth: int = 0
    """Number of last blocks of a prefix that must be in ``BlockChanges.group_stored`` for a request
    to reuse it: those of the window, or the one before the state; 0: none."""
    kv_bytes_per_token: int
    weight_bytes: int
    memory_bytes: int = 0
    """Bytes of memory that resident weights, the adapters of the start, and all blocks and states
    take; without a step's buffers."""
    num_parameters: int
    eos_token_ids: list[int]
    weight_version: str
    """SHA-256 over all bytes of the weights, hex."""
    system_fingerprint: str
    """Fingerprint in answers of the API; see ``KvIdentity.system_fingerprint``."""
    kv_identity: str
    """``KvIdentity.digest``, hex. Instances with different ones are different models to a client,
    so an answer never has tokens of both."""
    pid: int
    load_seconds: float
    hidden_size: int = 0
    """Number of elements of a token's hidden state."""
    num_labels: int = 0
    """Number of labels of a classification model; 0: the model generates tokens."""
    max_model_len_reason: str = ""
    """Reason for the context length that the instance serves, in words."""
    adapters: list[AdapterInfo] = []
    """Adapters of ``InstanceSpec.adapters`` that were loaded at the start."""
    adapter_failures: dict[str, str] = {}
    """Reason by name for each adapter that could not be loaded at the start."""
    num_state_slots: int = 0
    """Number of slots for recurrent states and snapshots; 0: the model has no state."""
    state_bytes: int = 0
    """Bytes of one recurrent state."""
    num_window_blocks: int = 0
    """Number of window blocks; 0: sliding-window layers have no blocks of their own."""
    window_block_bytes: int = 0
    """Bytes of one window block."""
    kv_peer: KvPeer | None = None
    """Addresses and layout for instances that read its blocks; None: its blocks cannot be read."""
    plan: list[tuple[str, str, str]] = []
    """Choices made for this machine as (item, value, reason), as `tandem plan` prints them."""
    rejected: list[tuple[str, str, str]] = []
    """Rejected alternatives as (item, value, reason)."""
    placement: list[PlacedLayers] = []
    """Storage of the layers' matrices."""
    packed_folders: list[str] = []
    """Folders on its machine from which packed weights are mapped."""
