"""What the handlers share, and the steps they have in common.

A ``ServerContext`` is made once by ``app.build_app`` and lives as long as the application. Nothing
in it depends on HTTP; handlers get it as their first argument.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import ConfigError, NotFoundError, PeerLostError
from tandem.core.wire import AddRequest, InstanceInfo, InstanceStage, SamplingParams
from tandem.server.config import ServerConfig
from tandem.server.engine import EngineClient
from tandem.server.generation import Generation, GenerationGroup
from tandem.server.lifecycle import Lifecycle
from tandem.server.metrics import RequestTimer, ServerMetrics
from tandem.server.prompts import PromptEncoder
from tandem.server.sampling import SamplingDefaults
from tandem.server.stop_strings import StopMatcher, StopStrings

__all__ = ["ChoicePlan", "ServerContext", "TextOptions"]


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text, for all choices of a request."""

    stop: Sequence[str] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One generation to run."""

    prompt_ids: list[int]
    sampling: SamplingParams
    text: TextOptions


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What concerns a request as a whole."""

    name: str
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None


@dataclass
class ServerContext:
    """Everything a handler needs.

    Attributes:
        model_names: what clients may ask for; the first is reported.
    """

    config: ServerConfig
    engine: EngineClient
    encoder: PromptEncoder
    model_names: tuple[str, ...]
    defaults: SamplingDefaults
    metrics: ServerMetrics
    lifecycle: Lifecycle
    clock: Clock = field(default_factory=MonotonicClock)
    created_at: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> str:
        """Return the name to report; None asks for whatever is served.

        Raises:
            NotFoundError: another model was asked for.
        """
        if name is None or name == "":
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            what = f"model {name[:200]!r} is not served here: ask for {served}"
            raise NotFoundError("server.check_model", what, field="model")
        return name

    def ready_info(self) -> InstanceInfo:
        """Return what runs.

        Raises:
            PeerLostError: the instance is loading, or down.
        """
        info = self.engine.info
        if info is None:
            stage = self.engine.stage
            is_failed = stage.stage == InstanceStage.FAILED
            what = "the instance failed" if is_failed else f"the model is {stage.stage}"
            detail = f": {stage.detail}" if stage.detail else ""
            raise PeerLostError("server.ready_info", f"{what}{detail}; /ready tells when")
        return info

    def make_timer(self) -> RequestTimer:
        """Start the clock of a request that has just been read."""
        return RequestTimer(self.metrics, self.clock)

    async def start(
        self, plans: Sequence[ChoicePlan], options: RequestOptions, timers: Sequence[RequestTimer]
    ) -> GenerationGroup:
        """Submit all choices of a request; the caller owns, and closes, what comes back.

        Raises:
            ConfigError: more choices than ``max_choices``, or refused by the engine.
            CapacityError: the queue is full; nothing is left queued.
            PeerLostError: the instance is down.
        """
        if len(plans) > self.config.max_choices:
            raise ConfigError(
                "server.start",
                f"{len(plans)} generations in one request, at most {self.config.max_choices} are "
                "served: send fewer prompts or a smaller n",
                field="n",
            )
        limit_s = self.config.request_timeout_s
        if options.timeout_s is not None:
            limit_s = min(limit_s, options.timeout_s)
        generations = [
            self._make_generation(index, plan, options, limit_s, timer)
            for index, (plan, timer) in enumerate(zip(plans, timers, strict=True))
        ]
        group = GenerationGroup(options.name, generations, self.lifecycle, limit_s)
        await group.submit(self.engine)
        return group

    def _make_generation(
        self,
        index: int,
        plan: ChoicePlan,
        options: RequestOptions,
        limit_s: float,
        timer: RequestTimer,
    ) -> Generation:
        request = AddRequest(
            # The client's own id may repeat, or be another's; the engine's never does.
            request_id=uuid.uuid4().hex,
            prompt_ids=plan.prompt_ids,
            sampling=plan.sampling,
            priority=options.priority,
            timeout_s=limit_s,
            cache_salt=options.cache_salt,
        )
        text = plan.text
        matcher = None
        if text.stop:
            matcher = StopMatcher(StopStrings(text.stop), keep_match=text.keep_stop)
        detokenizer = self.encoder.tokenizer.detokenizer(
            skip_special_tokens=text.skip_special_tokens, context=plan.prompt_ids[-8:]
        )
        return Generation(
            index, request, detokenizer, matcher, timer, keep_stop_token=text.keep_stop
        )


def as_list(value: str | list[str] | None) -> list[str]:
    """Return a field that may be one value, several or none as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value
