"""An engine in memory, deterministic, with the faults a server must stand.

``FakeEngine`` has the face of ``tandem.server.engine.EngineClient``. Its answer to a prompt is the
``answer`` it was given, token by token, or the prompt again if there is none. It accounts for what
it holds: ``num_held`` is zero when nothing leaked.
"""

import asyncio
import contextlib
import hashlib
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tandem.core.adapter import AdapterInfo, AdapterSource
from tandem.core.errors import CapacityError, NotFoundError, PeerLostError
from tandem.core.instance_status import ExpertCounts, InstanceStats, InstanceStatus
from tandem.core.timeline import InstanceTimeline
from tandem.core.wire import (
    AddRequest,
    FinishReason,
    InstanceInfo,
    InstanceStage,
    Pooling,
    PromptLogprobs,
    RequestOutput,
    StageChanged,
    TokenLogprob,
)


def make_info(vocab_size: int = 512, max_model_len: int = 256) -> InstanceInfo:
    """Describe an instance of a tiny model."""
    return InstanceInfo(
        model="org/tiny",
        architecture="Qwen3MoeForCausalLM",
        dtype="float32",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        block_size=16,
        num_blocks=64,
        kv_bytes_per_token=64,
        weight_bytes=1 << 20,
        memory_bytes=(1 << 20) + 64 * 16 * 64,
        num_parameters=1 << 18,
        eos_token_ids=[0],
        weight_version="f" * 64,
        system_fingerprint="fp_ffffffffffff_ffffff",
        kv_identity="f" * 64,
        pid=1,
        load_seconds=0.5,
        hidden_size=4,
        # A real model has one head; this one answers everything.
        num_labels=1,
    )


@dataclass
class FakeEngine:
    """The knobs are plain attributes and may be turned between requests.

    Attributes:
        answer: ids generated for every prompt; None repeats the prompt's.
        step_s: seconds between outputs; 0 yields to the loop only.
        tokens_per_step: ids in one output.
        max_running: requests held at once, beyond which ``submit`` raises CapacityError.
        die_after: outputs of a request after which the instance is lost.
        hang: outputs never come.
        is_down: ``submit`` waits, as it does for an instance that is being replaced; read once.
        num_waiting: requests that wait in ``submit``.
        pause_at: outputs after which each request waits until this is None.
        timeline: makes the instance's part of a timeline; None: it remembers nothing.
        stop_token_id: ends an answer that is shorter than max_tokens.
        play: makes the answer to each request, in place of ``answer``.
    """

    info: InstanceInfo | None = field(default_factory=make_info)
    stage: StageChanged = field(default_factory=lambda: StageChanged(InstanceStage.READY))
    answer: list[int] | None = None
    step_s: float = 0.0
    tokens_per_step: int = 1
    max_running: int = 1 << 20
    die_after: int | None = None
    hang: bool = False
    is_down: bool = False
    pause_at: int | None = None
    cached_len: int = 0
    stop_token_id: int | None = None
    requests: list[AddRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    held: dict[str, "FakeStream"] = field(default_factory=dict)
    generated: int = 0
    num_waiting: int = 0
    more_stats: dict = field(default_factory=dict)
    score_of: "Callable[[list[int]], float]" = lambda prompt_ids: float(prompt_ids[0])
    timeline: "Callable[[str], InstanceTimeline] | None" = None
    asked_timelines: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    margins: dict[str, float] = field(default_factory=dict)
    play: "Callable[[AddRequest], list[int]] | None" = None
    adapters: dict[str, AdapterInfo] = field(default_factory=dict)
    loaded: list[AdapterSource] = field(default_factory=list)
    changes: list[tuple] = field(default_factory=list)

    @property
    def last_info(self) -> InstanceInfo | None:
        return self.info

    @property
    def instances(self) -> list[InstanceStatus]:
        return [InstanceStatus(name="instance-0", role="unified", stage=self.stage, pid=1)]

    def reset(self) -> None:
        """Turn all knobs back and forget what happened; nothing may be held."""
        assert not self.held, self.held
        self.__init__(info=self.info)

    @property
    def num_held(self) -> int:
        """Requests that own blocks."""
        return len(self.held)

    async def set_role(self, name, role):
        self.changes.append(("role", name, role))

    async def drain(self, name, *, is_draining=True):
        self.changes.append(("drain", name, is_draining))

    async def restart(self, name, *, patience_s):
        self.changes.append(("restart", name, patience_s))

    async def restart_all(self, *, patience_s):
        self.changes.append(("restart_all", patience_s))

    async def add_instance(self, role):
        self.changes.append(("add", role))
        return "instance-1"

    async def remove_instance(self, name, *, patience_s):
        self.changes.append(("remove", name, patience_s))

    async def submit(self, request: AddRequest) -> "FakeStream":
        """Queue a request, or refuse it."""
        if self.info is None:
            raise PeerLostError("fake.submit", "the instance is down")
        if self.is_down:
            self.num_waiting += 1
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.num_waiting -= 1
        if len(self.held) >= self.max_running:
            raise CapacityError("fake.submit", f"the queue of {self.max_running} is full")
        assert request.request_id not in self.held, "an id was used twice"
        stream = FakeStream(self, request)
        self.requests.append(request)
        self.held[request.request_id] = stream
        return stream

    async def stats(self) -> InstanceStats:
        """Return counters; the prefix cache hits are those told to clients."""
        if self.info is None:
            raise PeerLostError("fake.stats", "the instance is down")
        return InstanceStats(
            stage=self.stage.stage,
            num_running=len(self.held),
            num_blocks=64,
            num_used_blocks=len(self.held),
            prompt_tokens=sum(len(r.prompt_ids) for r in self.requests),
            generated_tokens=self.generated,
            **self.more_stats,
        )

    async def list_timelines(self, request_ids):
        """Tell what ``timelines`` makes of each id."""
        self.asked_timelines += request_ids
        if self.info is None:
            raise PeerLostError("fake.timelines", "the instance is down")
        if self.timeline is None:
            return []
        return [self.timeline(request_id) for request_id in request_ids]

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """Pretend to load an adapter of any folder."""
        self.loaded.append(source)
        digest = hashlib.sha256(source.folder.encode()).hexdigest()
        self.adapters[source.name] = info = AdapterInfo(
            name=source.name,
            folder=source.folder,
            digest=digest,
            system_fingerprint=f"fp_{digest[:6]}",
            rank=4,
            num_modules=1,
            size_bytes=64,
        )
        return info

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Forget an adapter."""
        if name not in self.adapters:
            raise NotFoundError("fake.unload_adapter", f"no adapter {name!r}", field="lora_name")
        return self.adapters.pop(name)

    async def read_expert_counts(self) -> ExpertCounts:
        """Pretend that two tokens chose among three experts."""
        return ExpertCounts(layers=[0], num_tokens=2, counts=[[2, 0, 2]])

    def pool(self, request: AddRequest) -> bytes:
        """Make a vector of a prompt: its first token, its length and its kind of pooling."""
        kind = list(Pooling).index(request.sampling.pooling)
        numbers = [float(request.prompt_ids[0]), float(len(request.prompt_ids)), float(kind), 0.0]
        if request.sampling.pooling is Pooling.SCORE:
            return struct.pack("<f", self.score_of(request.prompt_ids))
        return struct.pack("<4f", *numbers)

    async def flush_cache(self) -> int:
        """Pretend to free seven blocks."""
        return 7


class FakeStream:
    """The outputs of one request."""

    def __init__(self, engine: FakeEngine, request: AddRequest) -> None:
        self._engine = engine
        self._request = request
        self._cancelled = asyncio.Event()

    async def cancel(self) -> None:
        """Free the request at once."""
        if self._engine.held.pop(self._request.request_id, None) is not None:
            self._engine.cancelled.append(self._request.request_id)
        self._cancelled.set()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        engine, request = self._engine, self._request
        answer, reason, stop_id = self._plan()
        size = engine.tokens_per_step
        steps = [answer[i : i + size] for i in range(0, len(answer), size)] or [[]]
        for number, ids in enumerate(steps):
            if await self._pause(number):
                return
            if engine.die_after == number:
                engine.held.pop(request.request_id, None)
                yield RequestOutput(
                    request.request_id, [], FinishReason.ERROR, error_code="peer_lost"
                )
                return
            is_last = number == len(steps) - 1
            engine.generated += len(ids)
            if is_last:
                engine.held.pop(request.request_id, None)
            yield self._output(number, ids, reason if is_last else None, stop_id)

    async def _pause(self, number: int) -> bool:
        """Wait for a step; returns whether the request was cancelled."""
        while (at := self._engine.pause_at) is not None and number >= at:
            if self._cancelled.is_set():
                return True
            await asyncio.sleep(0.005)
        timeout_s = None if self._engine.hang else self._engine.step_s
        if timeout_s == 0:
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cancelled.wait(), timeout_s)
        return self._cancelled.is_set()

    def _plan(self) -> tuple[list[int], FinishReason, int | None]:
        engine, sampling = self._engine, self._request.sampling
        answer = engine.answer if engine.play is None else engine.play(self._request)
        source = self._request.prompt_ids if answer is None else answer
        if answer is not None and len(source) < sampling.max_tokens:
            return list(source), FinishReason.STOP, engine.stop_token_id
        repeats = sampling.max_tokens // max(1, len(source)) + 1
        return (source * repeats)[: sampling.max_tokens], FinishReason.LENGTH, None

    def _output(
        self, number: int, ids: list[int], reason: FinishReason | None, stop_id: int | None
    ) -> RequestOutput:
        request = self._request
        wanted = request.sampling.logprobs
        stop_id = stop_id if reason == FinishReason.STOP else None
        scored = ids if stop_id is None else [*ids, stop_id]
        logprobs = None if wanted is None else [_logprob(i, wanted) for i in scored]
        prompt_logprobs = None
        if number == 0 and request.sampling.prompt_logprobs is not None:
            num_top = request.sampling.prompt_logprobs
            rest = [_logprob(i, num_top) for i in request.prompt_ids[1:]]
            prompt_logprobs = PromptLogprobs.pack([None, *rest], num_top)
        tells = number == 0 or reason is not None
        pooled = None
        if request.sampling.pooling is not None and reason is not None:
            pooled = self._engine.pool(request)
        return RequestOutput(
            request.request_id,
            ids,
            reason,
            prompt_len=len(request.prompt_ids) if tells else 0,
            cached_len=self._engine.cached_len if tells else 0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_token_id=stop_id,
            pooled=pooled,
        )


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = [(token_id + k, -0.25 * (k + 1)) for k in range(num_top)]
    return TokenLogprob(token_id, -0.25, top, 1 if top else 17)
