"""The part that the handlers share, and their common steps.

A ``ServerContext`` is made once by ``app.build_app`` and lives as long as the application. Handlers
get it as their first argument; of HTTP it knows the caller's key alone.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

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
from tandem.server.api.grammars import GrammarChecks
from tandem.server.api.kept_responses import KeptResponses
from tandem.server.api.names import ModelNames
from tandem.server.api.prompts import PromptEncoder
from tandem.server.api.sampling import SamplingDefaults, derive_seed
from tandem.server.batches.worker import BatchWorker
from tandem.server.clients import BATCHES, current_client
from tandem.server.config import ServerConfig
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
"""A scrape must not wait for a stuck instance; Prometheus itself gives up after ten seconds."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Settings of turning tokens into text, for all choices of a request."""

    stops: StopStrings | None = None
    keep_stop: bool = False
    skip_special_tokens: bool = True
    make_parser: Callable[[], OutputParser] | None = None
    """Makes the parser of a choice; None if nobody asks for the parts of the text."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are text all the same: the marks that the parser looks for."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a client asked for."""

    name: str
    """The one to report."""
    adapter: AdapterInfo | None = None
    """None is the model alone."""


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One generation to run."""

    prompt_ids: list[int]
    sampling: SamplingParams
    text: TextOptions
    message_end: int = 0
    """See ``AddRequest``."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request as a whole."""

    name: str
    model: ServedModel
    """The model that was asked for, or a LoRA adapter of it."""
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    pin_len: int = 0
    """Leading tokens of the prompt that the client asks to be cached."""
    pin_s: float = 0.0
    """For how long."""


def _unix_s() -> int:
    return int(datetime.now(UTC).timestamp())


@dataclass
class ServerContext:
    """Everything a handler needs.

    Attributes:
        models: what clients may ask for.
        has_keys: whether clients need an API key.
        terms: objectives, priorities and shares.
        has_admin_keys: whether there are keys of an admin.
        adapter_folder: from which adapters may be loaded while serving; None: nowhere.
        read_store: tells how the server's own store fares; None: there is none.
        pooling: of embeddings, unless a request says otherwise.
        wake: loads the model before what is sent is read, if it never was; None: it always is.
        hub: of the models of this address; None: there is this one alone.
        batches: works on batches while the application runs; None: they are switched off.
    """

    config: ServerConfig
    engine: EngineClient
    encoder: PromptEncoder
    models: ModelNames
    defaults: SamplingDefaults
    metrics: ServerMetrics
    lifecycle: Lifecycle
    timelines: TimelineRing
    tracer: RequestTracer | None = None
    has_keys: bool = False
    terms: TermsTable = field(default_factory=TermsTable)
    grammars: GrammarChecks = field(init=False)
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
    """Responses whose clients do not wait, by their ids."""

    def __post_init__(self) -> None:
        self.grammars = GrammarChecks(self.encoder.tokenizer)
        config = self.config
        self.kept_responses = KeptResponses(
            config.response_memory_bytes,
            config.response_idle_s,
            max_total_bytes=config.response_total_bytes,
        )

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; 1 while no instance has told it."""
        info = self.engine.info
        return 1 if info is None else info.block_size

    @property
    def siblings(self) -> "list[ServerContext]":
        """The contexts of all models of this address, this one included."""
        if self.hub is None:
            return [self]
        return [model.app.state.context for model in self.hub.models.values()]

    def find_model(self, name: str | None) -> ServedModel:
        """Resolve a name; None asks for the served model.

        Raises:
            NotFoundError: another model was asked for.
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
        """Return what runs, or ran last: a request waits for an instance that is replaced.

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
        """Return the ``system_fingerprint`` of answers of a model, once there is one."""
        if model.adapter is not None:
            return model.adapter.system_fingerprint
        return self.ready_info().system_fingerprint

    async def read_stats(self) -> InstanceStats | None:
        """Return the instance's counters, None while it is down or does not answer."""
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                return await self.engine.stats()
        except (PeerLostError, TimeoutError):  # DeadlineError is a TimeoutError.
            return None

    def note_arrival(self, http: Request) -> Origin:
        """Return the caller's key digest and the time of arrival."""
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
        """Return the digest of the caller's key; empty where none is asked for."""
        return identify_owner(http.scope["headers"]) if self.has_keys else b""

    async def read_body(self, http: Request) -> bytes:
        """Read the body of a request within the bounds of its size and time.

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
        """Read and decode a body; a large one on the threads.

        Args:
            http: whose body has not been read.
            decoder: of the struct that is returned.
            refused: fields that are not supported, each with the reason, or what refuses them.

        Raises:
            HttpError: the body is too long or too late.
            ConfigError: it is not what the decoder takes.
            UnsupportedError: it asks for a field of ``refused``.
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
        """Run what a request needs before it is generated, on the threads, in its client's turn.

        Args:
            http: whose body has been read.
            origin: when it came.
            timeout_s: that it asks for; None: the server's limit alone.
            work: blocks, in time that depends on the size of the body.
            args: of ``work``.

        Raises:
            DeadlineError: it was not over in time.
            ClientGoneError: the client left.
            TandemError: what ``work`` raises.
        """
        async with limit_time(self.find_time_left(origin, timeout_s)):
            running = self.encoder.threads.run(work, http.state.body_bytes, *args)
            return await run_while_connected(http.receive, running)

    async def shape(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """Run what gives an answer its form: here, or on the threads if it is long.

        Args:
            size_bytes: of what it makes, about.
            work: uses nothing that another task changes.
        """
        if size_bytes <= SMALL_COST:
            return work()
        return await self.encoder.threads.run(work, size_bytes)

    def find_time_left(self, origin: Origin, timeout_s: float | None) -> float:
        """Return the seconds that a request may still take, by its own limit and the server's."""
        limit_s = self.config.request_timeout_s
        if timeout_s is not None:
            limit_s = min(limit_s, timeout_s)
        return max(limit_s - (self.clock.now_s() - origin.arrived_s), 0.0)

    def now_unix_s(self) -> int:
        """Return the wall clock, for ``created`` fields."""
        return _unix_s()

    def check_choices(self, num_choices: int) -> None:
        """Refuse a request that asks for more generations than one may; before any work.

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
        """Submit all choices of a request; the caller owns, and closes, what comes back.

        Raises:
            ConfigError: refused by the engine.
            CapacityError: the queue is full; nothing is left queued.
            PeerLostError: the instance is down, and did not come back in time.
            DeadlineError: its time is over before an instance took it.
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
        """Take from the time to first token what has passed since the arrival."""
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
