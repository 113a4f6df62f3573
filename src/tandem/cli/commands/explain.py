"""``tandem explain``: the course of one request (waits, loads, steps), and why no more of its
prompt was found in the prefix cache.
"""

import sys
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import msgspec
import typer

from tandem.cli.asking.local_server import trim_url
from tandem.cli.output import JsonFlag, print_json
from tandem.core.errors import NotFoundError, PeerLostError
from tandem.core.timeline import (
    ChoiceTimeline,
    InstanceTimeline,
    KvLoadRecord,
    RequestTimeline,
    describe_miss,
)

if TYPE_CHECKING:
    import httpx

__all__ = ["explain", "render_timeline"]

TIMEOUT_S = 10.0
BAR_WIDTH = 24


def explain(
    request: Annotated[
        str, typer.Argument(help="Id of the answer, or the x-request-id of the request.")
    ],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Key that sent the request.")] = None,
    json: JsonFlag = False,
) -> None:
    """Show where the time of a request went, and why KV was computed instead of reused."""
    timeline = _fetch(request, url, {"Authorization": f"Bearer {api_key}"} if api_key else {})
    if json:
        print_json(timeline)
    else:
        sys.stdout.write(render_timeline(timeline))


def _fetch(request: str, url: str, headers: dict[str, str]) -> RequestTimeline:
    import httpx

    path = f"/requests/{quote(request, safe='', errors='replace')}/timeline"
    try:
        reply = httpx.get(trim_url(url) + path, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        what = f"no answer from {url}: {error}: does a server run there?"
        raise PeerLostError("cli.explain", what) from error
    if reply.status_code != 200:
        raise NotFoundError("cli.explain", f"{url} answers {reply.status_code}: {_read(reply)}")
    try:
        return msgspec.json.decode(reply.content, type=RequestTimeline)
    except msgspec.MsgspecError as error:
        raise PeerLostError("cli.explain", f"{url} is no server of this version: {error}") from (
            error
        )


def _read(reply: "httpx.Response") -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]


def render_timeline(timeline: RequestTimeline) -> str:
    """Return a request's timeline as text: a waterfall of phases, and reasons in words."""
    state = "ended" if timeline.is_ended else "in flight"
    lines = [f"{timeline.id}  {timeline.path}  {state} after {_time(timeline.age_s)}"]
    if timeline.request_id not in timeline.id:
        lines.append(f"x-request-id {timeline.request_id}")
    for choice in timeline.choices:
        if len(timeline.choices) > 1:
            lines += ["", f"choice {choice.index}"]
        lines += _render_choice(timeline, choice)
    return "\n".join(lines) + "\n"


def _render_choice(timeline: RequestTimeline, choice: ChoiceTimeline) -> list[str]:
    total_s = timeline.age_s
    lines = [_row("read, tokenized", 0.0, timeline.tokenized_s, total_s)]
    instances = sorted(choice.instances, key=_find_begin)
    is_single = len(instances) == 1
    for instance in instances:
        if not is_single:
            lines.append(f"  {instance.instance} ({instance.role})")
        zero_s = choice.submitted_s + instance.sent_s
        # With several instances (one for prefill, another for decode) the generation may end after
        # this instance's phases, so its end is not passed on.
        lines += _render_phases(instance, zero_s, total_s, choice.end_s if is_single else None)
    if not choice.instances:
        end_s = total_s if choice.end_s is None else choice.end_s
        lines.append(_row("at the instance", choice.submitted_s, end_s, total_s))
        lines.append("  the instance is down, or remembers nothing of it")
    for instance in instances:
        lines += _render_facts(instance)
    end = "goes on" if choice.end_s is None else f"ended: {choice.finish_reason}"
    lines.append(
        f"  {choice.prompt_tokens} tokens of prompt, {choice.output_tokens} generated; {end}"
    )
    return lines


def _find_begin(told: InstanceTimeline) -> float:
    """Return the time at which an instance began to compute a request, or would have. Sorted by
    this time, the timeline of the prefill instance comes before that of the decode instance.
    """
    return told.sent_s + (told.age_s if told.admitted_s is None else told.admitted_s)


def _render_phases(
    told: InstanceTimeline, zero_s: float, total_s: float, ended_s: float | None
) -> list[str]:
    now_s = told.age_s
    looked_s = 0.0 if told.lookup is None else told.lookup.seconds
    lines: list[str] = []
    if told.lookup is not None:
        lines.append(_row("lookup", zero_s, zero_s + looked_s, total_s))
    admitted_s = now_s if told.admitted_s is None else told.admitted_s
    lines.append(_row("queue", zero_s + looked_s, zero_s + admitted_s, total_s))
    for load in told.loads:
        end_s = now_s if load.end_s is None else load.end_s
        row = _row("  load", zero_s + load.begin_s, zero_s + end_s, total_s)
        lines.append(f"{row}  {_describe_load(load)}")
    if told.admitted_s is None:
        return lines
    first_s = now_s if told.first_token_s is None else told.first_token_s
    if told.num_prefill_steps:
        row = _row("prefill", zero_s + admitted_s, zero_s + first_s, total_s)
        lines.append(f"{row}  {told.num_prefill_steps} steps, {_time(told.prefill_s)}")
    else:
        # This instance continues a request whose first tokens another instance has computed.
        first_s = admitted_s
    if told.first_token_s is not None and told.num_decode_steps:
        end_s = zero_s + now_s if ended_s is None else max(ended_s, zero_s + first_s)
        row = _row("decode", zero_s + first_s, end_s, total_s)
        lines.append(f"{row}  {told.num_decode_steps} steps, {_time(told.decode_s)}")
    return lines


def _describe_load(load: KvLoadRecord) -> str:
    text = f"{load.loaded_blocks} of {load.asked_blocks} blocks from {load.source}"
    if load.loaded_bytes:
        text += f", {load.loaded_bytes / 2**20:.1f} MiB"
    for reason, count in sorted(load.failures.items()):
        text += f", {count} {reason}"
    return text


def _render_facts(told: InstanceTimeline) -> list[str]:
    lines: list[str] = []
    name = f"{told.instance} ({told.role})" if told.instance else told.role
    if told.admitted_s is None:
        lines.append(f"  {name}: {told.state}, not admitted yet")
    else:
        lines.append(
            f"  {name}: {told.device_tokens} prompt tokens from the device, {told.loaded_tokens} "
            f"loaded, {told.computed_tokens} computed"
        )
    if len(told.considered) > 1:
        real = "" if told.real_ttft_s is None else f", came after {_time(told.real_ttft_s)}"
        lines.append(f"  first token predicted{real}:")
        lines += [
            f"    {each.instance}: {_time(each.ttft_s)}, transfer {_time(each.transfer_s)} + queue "
            f"{_time(each.queue_s)} + prefill {_time(each.prefill_s)}; {each.prefix_tokens} tokens "
            "are there"
            for each in told.considered
        ]
    lookup = told.lookup
    if lookup is not None:
        found = f"{lookup.found_blocks} found" if lookup.is_answered else "no answer"
        lines.append(f"  store asked for {lookup.asked_blocks} blocks: {found}")
    if told.miss is not None:
        lines.append(f"  why computed: {describe_miss(told.miss)}")
    if told.deferred_steps:
        lines.append(
            f"  waited {told.deferred_steps} steps for another request that computed its prefix"
        )
    if told.num_preemptions:
        moments = ", ".join(_time(moment_s) for moment_s in told.preempted_s)
        lines.append(f"  preempted {told.num_preemptions} times, at {moments}")
    return lines


def _row(name: str, begin_s: float, end_s: float, total_s: float) -> str:
    """Return a line of the waterfall: a phase's name, begin and duration, and a bar."""
    scale = BAR_WIDTH / total_s if total_s > 0 else 0.0
    first = min(int(begin_s * scale), BAR_WIDTH - 1)
    length = max(min(round(end_s * scale), BAR_WIDTH) - first, 1)
    bar = (" " * first + "#" * length).ljust(BAR_WIDTH)
    return f"  {name:<16} {_time(begin_s):>9} {_time(end_s - begin_s):>9}  |{bar}|"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"
