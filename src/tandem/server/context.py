"""The objects that all handlers share, and the steps that they have in common.

``app.build_app`` makes one ``ServerContext``, which lives as long as the application. Handlers get
it as their first argument.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from tandem.core.adapter import AdapterInfo
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import (
    ConfigError,
    NotFoundError,
    OverloadError,
    PeerLostError,
    TandemError,
)
from tandem.core.instance_status import InstanceStats, StoreStatus
from tandem.core.logs import current_request_id
from tandem.core.wire import (
    AddRequest,
    InstanceInfo,
    InstanceStage,
    Pooling,
    SamplingParams,
)
from tandem.models.file_facts import FileFacts
from tandem.server.api.grammars import GrammarCompiler
from tandem.server.api.kept_responses import KeptResponses
from tandem.server.api.names import ModelNames
from tandem.server.api.prompts import PromptEncoder
from tandem.server.api.sampling import derive_seed
from tandem.server.batches.worker import BatchWorker
from tandem.server.clients import BATCHES, current_client
from tandem.server.config import ServerConfig
from tandem.server.defaults import DefaultSampling
from tandem.server.edge.auth import identify_owner
from tandem.server.edge.connection import limit_time, read_body, run_while_connected
from tandem.server.engine import EngineClient
from tandem.server.generation import Generation, GenerationGroup
from tandem.server.lifecycle import Lifecycle
from tandem.server.objectives import ServiceTerms, TermsTable
from tandem.server.outputs.deltas import OutputParser
from tandem.server.protocol.decode import decode_body, refuse_unsupported
from tandem.server.telemetry.metrics import RequestTimer, ServerMetrics
from tandem.server.telemetry.timelines import (
    ChoiceRecord,
    Origin,
    RequestRecord,
    SharingIdentity,
    TimelineRing,
    digest_head,
    digest_text,
)
from tandem.server.telemetry.tracing import RequestTracer
from tandem.server.telemetry.traffic import EndedRequest, TrafficLog
from tandem.server.text.stop_strings import StopMatcher, StopStrings
from tandem.server.text.work_threads import SMALL_COST

if TYPE_CHECKING:
    from tandem.server.hub.hub import ModelHub

__all__ = ["ChoicePlan", "RequestOptions", "ServedModel", "ServerContext", "TextOptions"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
MIN_TTFT_S = 0.001
_STATS_TIMEOUT_S = 2.0
"""Seconds to wait for an instance's statistics; Prometheus gives up a scrape after ten seconds."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of the conversion of tokens to text, for all choices of a request."""

    stops: StopStrings | None = None
    keep_stop: bool = False
    skip_special_tokens: bool = True
    make_parser: Callable[[], OutputParser] | None = None
    """Makes the parser that splits a choice's text into parts; None if the text is not split."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are converted to text, because they are marks that the parser looks
    for."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a client asked for: this server's, or a LoRA adapter of it."""

    name: str
    """Name of the model or adapter to report in answers."""
    adapter: AdapterInfo | None = None
    """LoRA adapter; None: the model alone."""


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One generation to run for a request: its prompt and its parameters."""

    prompt_ids: list[int]
    sampling: SamplingParams
    text: TextOptions
    message_end: int = 0
    """Number of prompt tokens up to the end of its last message; see ``AddRequest.message_end``."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that hold for all generations of a request."""

    name: str
    model: ServedModel
    """The model, or LoRA adapter of it, that was asked for."""
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    pin_len: int = 0
    """Number of leading prompt tokens that the client asks to be kept in the cache."""
    pin_s: float = 0.0
    """Seconds for which the client asks that those tokens be kept in the cache."""


def _unix_s() -> int:
    return int(datetime.now(UTC).timestamp())


@dataclass
class ServerContext:
    """The objects and settings that handlers need.

    Attributes:
        models: names under which clients may ask for the model.
        has_keys: True if clients need an API key.
        terms: latency objectives, priorities and shares of clients.
        has_admin_keys: True if there are admin keys.
        adapter_folder: folder from which adapters may be loaded while serving; None: none may.
        read_store: returns the state of the server's own store; None: there is none.
        pooling: default kind of embeddings.
        wake: loads the model if it never was, before a request is read; None: it always is loaded.
        hub: the models of this address; None: there is only this one.
        batches: worker of batches while the application runs; None: batches are off.
    """

    config: ServerConfig
    engine: EngineClient
    encoder: PromptEncoder
    models: ModelNames
    defaults: DefaultSampling
    files: FileFacts
    metrics: ServerMetrics
    lifecycle: Lifecycle
    timelines: TimelineRing
    tracer: RequestTracer | None = None
    has_keys: bool = False
    terms: TermsTable = field(default_factory=TermsTable)
    grammars: GrammarCompiler = field(init=False)
    has_admin_keys: bool = False
    adapter_folder: Path | None = None
    read_store: Callable[[], StoreStatus] | None = None
    pooling: Pooling = Pooling.LAST
    wake: Callable[[], Awaitable[None]] | None = None
    hub: "ModelHub | None" = None
    batches: BatchWorker | None = None
    clock: Clock = field(default_factory=MonotonicClock)
    created_at: int = field(default_factory=_unix_s)

    traffic: TrafficLog = field(default_factory=TrafficLog)
    kept_responses: KeptResponses = field(init=False)
    background_jobs: dict[str, asyncio.Task[None]] = field(init=False, default_factory=dict)
    """Tasks of responses whose clients do not wait, by the responses' ids."""

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.encoder.tokenizer, self.config.grammar_timeout_s)
        config = self.config
        self.kept_responses = KeptResponses(
            config.response_memory_bytes,
            config.response_idle_s,
            max_total_bytes=config.response_total_bytes,
        )

    def close(self) -> None:
        """End the processes and threads of clients' texts and grammars. Idempotent."""
        self.grammars.close()
        self.encoder.close()

    @property
    def block_size(self) -> int:
        """Number of tokens of a KV block; 1 until an instance has reported it."""
        info = self.engine.info
        return 1 if info is None else info.block_size

    @property
    def siblings(self) -> "list[ServerContext]":
        """The contexts of all models that are served at this address, this one included."""
        if self.hub is None:
            return [self]
        return [model.app.state.context for model in self.hub.models.values()]

    def find_model(self, name: str | None) -> ServedModel:
        """Return the model with this name; for None, the served model.

        Raises:
            NotFoundError: there is no model of that name.
        """
        found = self.models.find(name if name is not None else "")
        if found is None:
            adapter = self.engine.adapters.get(name or "")
            if adapter is not None:
                return ServedModel(adapter.name, adapter)
            served = ", ".join(
                name
                for each in self.siblings
                for name in [*each.models.served, *each.engine.adapters]
            )
            what = f"model {str(name)[:200]!r} is not served here: ask for {served}"
            raise NotFoundError("server.find_model", what, field="model")
        return ServedModel(found)

    def ready_info(self) -> InstanceInfo:
        """Return the facts of the running instance, or of the last one while it is being replaced.

        Raises:
            PeerLostError: the model is loading for the first time, or cannot be served.
        """
        info = self.engine.last_info
        if info is None:
            stage = self.engine.stage
            is_failed = stage.stage == InstanceStage.FAILED
            what = "the instance failed" if is_failed else f"the model is {stage.stage}"
            detail = f": {stage.detail}" if stage.detail else ""
            raise PeerLostError("server.ready_info", f"{what}{detail}; /ready tells when")
        return info

    def find_fingerprint(self, model: ServedModel) -> str:
        """Return the ``system_fingerprint`` of a model's answers.

        Raises: errors of ``ready_info``, before an instance has served.
        """
        if model.adapter is not None:
            return model.adapter.system_fingerprint
        return self.ready_info().system_fingerprint

    async def read_stats(self) -> InstanceStats | None:
        """Return the instances' statistics; None while they are down or do not answer."""
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                return await self.engine.stats()
        except (PeerLostError, TimeoutError):  # DeadlineError is a TimeoutError.
            return None

    def note_arrival(self, http: Request) -> Origin:
        """Return the origin of a request that has just arrived: digest of its key, time of arrival,
        headers.
        """
        return Origin(
            arrived_s=self.clock.now_s(),
            arrived_at=datetime.now(UTC).timestamp(),
            owner=self.find_owner(http),
            request_id=current_request_id.get(),
            path=http.url.path,
            traceparent=http.headers.get("traceparent", ""),
            headers=http.headers,
        )

    def find_owner(self, http: Request) -> bytes:
        """Return the digest of the caller's key; empty if the server needs no keys."""
        return identify_owner(http.scope["headers"]) if self.has_keys else b""

    async def read_body(self, http: Request) -> bytes:
        """Read the body of a request, within the limits of its size and time.

        Raises:
            HttpError: 413 or 408; see ``connection.read_body``.
        """
        body = await read_body(http, self.config.max_body_bytes, self.config.body_timeout_s)
        http.state.body_bytes = len(body)
        return body

    async def read_request(
        self,
        http: Request,
        decoder: msgspec.json.Decoder[_T],
        refused: Mapping[str, str] | Callable[[bytes], None] | None = None,
    ) -> _T:
        """Read and decode the body of a request; a large one is decoded on the worker threads.

        Args:
            http: request whose body has not been read.
            decoder: decoder of the struct that is returned.
            refused: unsupported fields with reasons, or a function that refuses them.

        Raises:
            HttpError: the body is too long or too late.
            ConfigError: the body is not valid for the decoder.
            UnsupportedError: it has a field of ``refused``.
        """
        body = await self.read_body(http)

        def decode() -> _T:
            request = decode_body(body, decoder)
            if callable(refused):
                refused(body)
            elif refused is not None:
                refuse_unsupported(body, refused)
            return request

        if len(body) <= SMALL_COST:
            return decode()
        return await run_while_connected(http.receive, self.encoder.threads.run(decode, len(body)))

    async def prepare(
        self,
        http: Request,
        origin: Origin,
        timeout_s: float | None,
        work: Callable[[*_Ts], _T],
        *args: *_Ts,
    ) -> _T:
        """Run blocking work that a request needs before generation on the worker threads, when it
        is its client's turn.

        Args:
            http: request whose body has been read.
            origin: origin of the request.
            timeout_s: time limit that the request asks for; None: the server's limit only.
            work: function whose time depends on the size of the body; see
                ``GrammarCompiler.plan``.
            args: arguments of ``work``.

        Raises:
            DeadlineError: it was not finished in time.
            ClientGoneError: the client left.
            ConfigError: a value of the body is nested deeper than Python's stack.
            TandemError: errors of ``work``.
        """
        async with limit_time(self.find_time_left(origin, timeout_s)):

            def begin() -> Coroutine[Any, Any, _T]:
                return self.encoder.threads.run(work, http.state.body_bytes, *args)

            try:
                return await run_while_connected(http.receive, self.grammars.plan(begin))
            except RecursionError as error:
                what = "a value of the body is nested too deep"
                raise ConfigError("server.prepare", what) from error

    async def shape(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """Run a function that makes an answer: on the worker threads if the answer is long,
        otherwise at once on the event loop.

        Args:
            size_bytes: estimated size of the answer.
            work: function that uses nothing that another task changes.
        """
        if size_bytes <= SMALL_COST:
            return work()
        return await self.encoder.threads.run(work, size_bytes)

    def find_time_left(self, origin: Origin, timeout_s: float | None) -> float:
        """Return the seconds that a request may still take, by its own and the server's limit."""
        limit_s = self.config.request_timeout_s
        if timeout_s is not None:
            limit_s = min(limit_s, timeout_s)
        return max(limit_s - (self.clock.now_s() - origin.arrived_s), 0.0)

    def now_unix_s(self) -> int:
        """Return the wall-clock time in Unix seconds, for ``created`` fields."""
        return _unix_s()

    def check_choices(self, num_choices: int) -> None:
        """Check, before any work, that a request does not ask for too many generations.

        Raises:
            ConfigError: more than ``max_choices``.
        """
        if num_choices > self.config.max_choices:
            raise ConfigError(
                "server.check_choices",
                f"{num_choices} generations in one request, at most {self.config.max_choices} "
                "are served: send fewer prompts or a smaller n",
                field="n",
            )

    async def start(
        self,
        plans: Sequence[ChoicePlan],
        options: RequestOptions,
        origin: Origin,
        receive: Receive,
    ) -> GenerationGroup:
        """Submit all generations of a request; the caller owns the returned group and closes it.

        Raises:
            ConfigError: refused by the engine.
            CapacityError: the queue is full; nothing is left queued.
            PeerLostError: the instance is down, and did not come back in time.
            DeadlineError: no instance accepted it in time.
            ClientGoneError: the client left; nothing is left queued.
        """
        limit_s = self.find_time_left(origin, options.timeout_s)
        terms = self._find_terms(options, origin)
        generations = [
            self._make_generation(
                index,
                plan,
                options,
                limit_s,
                RequestTimer(self.metrics, self.clock, origin.arrived_s, terms.slo),
                self._shorten(terms, origin),
                origin.request_id,
            )
            for index, plan in enumerate(plans)
        ]
        record = self._record(options, origin, generations)
        group = GenerationGroup(
            options.name,
            generations,
            self.lifecycle,
            limit_s,
            lambda: self._note_closed(record, generations),
            origin.owner,
        )
        try:
            async with limit_time(limit_s):
                await run_while_connected(receive, group.submit(self.engine))
        except BaseException as error:
            code = error.code if isinstance(error, TandemError) else "abort"
            if isinstance(error, OverloadError):
                self.metrics.count_slo("rejected")
            # The engine may have accepted the request just before the wait was cancelled or failed:
            # closing the group cancels it there.
            await group.close()
            record.refuse(code, self.clock.now_s() - origin.arrived_s)
            raise
        return group

    def _find_terms(self, options: RequestOptions, origin: Origin) -> ServiceTerms:
        client = current_client.get()
        if client == BATCHES:
            # A batch has no waiting client: its requests carry no latency objectives, so they are
            # neither refused for them nor counted in attainment.
            return ServiceTerms()
        return self.terms.find(options.model.name, client, origin.headers.get)

    def _shorten(self, terms: ServiceTerms, origin: Origin) -> ServiceTerms:
        """Subtract the time since a request's arrival from its objective for the time to first
        token.
        """
        ttft_s = terms.slo.ttft_s
        if ttft_s is None:
            return terms
        left_s = max(ttft_s - (self.clock.now_s() - origin.arrived_s), MIN_TTFT_S)
        return terms._replace(slo=msgspec.structs.replace(terms.slo, ttft_s=left_s))

    def _note_closed(self, record: RequestRecord, generations: Sequence[Generation]) -> None:
        if self.tracer is not None:
            self.tracer.trace(record)
        if not self.traffic.is_recorded:
            return
        for each in generations:
            if not each.was_accepted:
                continue
            asked = each.request
            ended = EndedRequest(
                record.origin.arrived_s,
                asked.prompt_ids,
                each.num_tokens,
                f"{asked.adapter}/{asked.cache_salt}",
            )
            self.traffic.note_end(ended, self.clock.now_s())

    def _record(
        self, options: RequestOptions, origin: Origin, generations: Sequence[Generation]
    ) -> RequestRecord:
        info = self.engine.info
        if options.model.adapter is not None:
            fingerprint = options.model.adapter.system_fingerprint
        else:
            fingerprint = "" if info is None else info.system_fingerprint
        identity = SharingIdentity(
            cache_salt=digest_text(options.cache_salt),
            model=fingerprint,
            process=0 if info is None else info.pid,
        )
        record = RequestRecord(
            name=options.name,
            origin=origin,
            identity=identity,
            submitted_s=self.clock.now_s() - origin.arrived_s,
            choices=[
                ChoiceRecord(
                    request_id=each.request_id,
                    timer=each.timer,
                    prompt_tokens=len(each.request.prompt_ids),
                    head=digest_head(each.request.prompt_ids, self.block_size),
                )
                for each in generations
            ],
        )
        self.timelines.add(record)
        return record

    def _make_generation(
        self,
        index: int,
        plan: ChoicePlan,
        options: RequestOptions,
        limit_s: float,
        timer: RequestTimer,
        terms: ServiceTerms,
        request_id: str,
    ) -> Generation:
        sampling = plan.sampling
        if sampling.seed is None and request_id:
            seed = derive_seed(request_id, index)
            sampling = msgspec.structs.replace(sampling, seed=seed)
        request = AddRequest(
            # The engine gets a fresh id: a client may repeat its own request id, or use another
            # client's.
            request_id=uuid.uuid4().hex,
            prompt_ids=plan.prompt_ids,
            sampling=sampling,
            priority=options.priority + terms.priority,
            timeout_s=limit_s,
            client=current_client.get(),
            weight=terms.weight,
            slo=terms.slo,
            cache_salt=options.cache_salt,
            adapter="" if options.model.adapter is None else options.model.adapter.digest,
            message_end=plan.message_end,
            pin_len=options.pin_len,
            pin_s=options.pin_s,
        )
        text = plan.text
        matcher = None
        if text.stops is not None:
            matcher = StopMatcher(text.stops, keep_match=text.keep_stop)
        detokenizer = self.encoder.tokenizer.detokenizer(
            skip_special_tokens=text.skip_special_tokens,
            shown_ids=text.shown_ids,
            context=plan.prompt_ids[-8:],
            is_exact=bool(sampling.grammar),
        )
        return Generation(
            index,
            request,
            detokenizer,
            matcher,
            timer,
            parser=None if text.make_parser is None else text.make_parser(),
            keep_stop_token=text.keep_stop,
        )
