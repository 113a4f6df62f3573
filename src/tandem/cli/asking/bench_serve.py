"""``tandem bench serve``: measure any server with OpenAI's API under a workload."""

import asyncio
import sys
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tandem.bench.clients.report import draw_run, render_report
from tandem.bench.clients.workloads import (
    Conversation,
    IdRange,
    Turn,
    draw_arrivals,
    make_multi_turn,
    make_random,
    make_shared_prefix,
    read_sharegpt,
    read_trace,
)
from tandem.cli.output import print_json
from tandem.core.errors import ConfigError
from tandem.core.loads.figures import Objectives, find_percentile, summarise
from tandem.core.loads.records import RequestRecord

__all__ = ["serve"]


class Dataset(StrEnum):
    """The workloads (kinds of prompts and answers) that a load on a server can have."""

    RANDOM = "random"
    SHARED_PREFIX = "generated-shared-prefix"
    MULTI_TURN = "multi-turn"
    SHAREGPT = "sharegpt"
    MOONCAKE = "mooncake"


class EndpointName(StrEnum):
    """The endpoints of a server whose latencies can be measured."""

    COMPLETIONS = "completions"
    CHAT = "chat"


def serve(
    base_url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str, typer.Option(help="Name in requests; empty asks the server.")] = "",
    api_key: Annotated[str, typer.Option(help="Key of the server.")] = "",
    endpoint: Annotated[
        EndpointName | None, typer.Option(help="By the load: chat for texts, else completions.")
    ] = None,
    dataset_name: Annotated[Dataset, typer.Option(help="The load.")] = Dataset.RANDOM,
    dataset_path: Annotated[
        Path | None, typer.Option(help="File of sharegpt or of a Mooncake trace.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests, or conversations.")] = 100,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Shortest length as a share of the longest.")
    ] = 1.0,
    gsp_num_groups: Annotated[int, typer.Option(min=1, help="Groups of a prefix.")] = 8,
    gsp_prompts_per_group: Annotated[int, typer.Option(min=1, help="Requests of each.")] = 8,
    gsp_system_prompt_len: Annotated[int, typer.Option(min=1, help="Shared tokens.")] = 1024,
    gsp_question_len: Annotated[int, typer.Option(min=1, help="Own tokens.")] = 128,
    turns: Annotated[int, typer.Option(min=1, help="Messages of a multi-turn chat.")] = 4,
    length_divisor: Annotated[
        int, typer.Option(min=1, help="Divides the lengths of a trace, for a small model.")
    ] = 1,
    slowdown: Annotated[float, typer.Option(min=0, help="Stretches the times of a trace.")] = 1.0,
    prompt_ids: Annotated[
        str, typer.Option(metavar="FIRST:LAST", help="Ids that prompts are drawn from.")
    ] = "300:999",
    request_rate: Annotated[float, typer.Option(help="Poisson, a second; inf is at once.")] = (
        float("inf")
    ),
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at most.")
    ] = None,
    warmup_requests: Annotated[int, typer.Option(min=0, help="Sent before, not counted.")] = 1,
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY:MS", help="ttft, tpot, tbt or e2el in ms; may be repeated."),
    ] = None,
    slo_tps: Annotated[
        float | None,
        typer.Option(min=0, help="Search how many users get so many tokens/s each."),
    ] = None,
    max_users: Annotated[int, typer.Option(min=1, help="Users that the search tries.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    disable_ignore_eos: Annotated[
        bool, typer.Option("--disable-ignore-eos", help="Let answers end where they would.")
    ] = False,
    extra_request_body: Annotated[
        str, typer.Option(metavar="JSON", help="Fields that every request has.")
    ] = "{}",
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 1,
    output_file: Annotated[
        Path | None, typer.Option(help="Append the figures as a JSON line.")
    ] = None,
    output_details: Annotated[
        Path | None, typer.Option(help="Write a JSON line for each request.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the run, as PNG or SVG.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Send a load to a server and print TTFT, TPOT, ITL, latency, throughput and goodput."""
    from tandem.bench.clients.client import Target

    is_text = dataset_name in (Dataset.SHAREGPT, Dataset.MULTI_TURN)
    chosen = endpoint or (EndpointName.CHAT if is_text else EndpointName.COMPLETIONS)
    if chosen is EndpointName.CHAT and not is_text:
        what = f"{dataset_name} sends token ids: use --endpoint completions"
        raise ConfigError("bench.serve", what)
    if chosen is EndpointName.COMPLETIONS and dataset_name is Dataset.MULTI_TURN:
        raise ConfigError("bench.serve", "multi-turn is a chat: use --endpoint chat")
    if not request_rate > 0:
        raise ConfigError("bench.serve", f"--request-rate {request_rate}: give more than 0, or inf")
    rate = None if request_rate == float("inf") else request_rate
    objectives = _read_objectives(goodput or [])
    target = Target(
        base_url=base_url,
        model=model,
        endpoint=chosen.value,
        api_key=api_key,
        temperature=temperature,
        ignores_eos=not disable_ignore_eos,
        extra_body=_read_object(extra_request_body),
    )
    ids = _read_ids(prompt_ids)

    def make_load(number: int, seed: int) -> list[Conversation]:
        lengths = (random_input_len, random_output_len)
        match dataset_name:
            case Dataset.RANDOM:
                return make_random(number, *lengths, ratio=random_range_ratio, ids=ids, seed=seed)
            case Dataset.SHARED_PREFIX:
                return make_shared_prefix(
                    gsp_num_groups,
                    gsp_prompts_per_group,
                    prefix_length=gsp_system_prompt_len,
                    question_length=gsp_question_len,
                    output_length=random_output_len,
                    ids=ids,
                    seed=seed,
                )
            case Dataset.MULTI_TURN:
                return make_multi_turn(
                    number,
                    turns,
                    question_length=random_input_len,
                    output_length=random_output_len,
                    seed=seed,
                )
            case Dataset.SHAREGPT:
                path = _require_path(dataset_path, dataset_name)
                return read_sharegpt(path, number, output_length=random_output_len, seed=seed)
            case Dataset.MOONCAKE:
                path = _require_path(dataset_path, dataset_name)
                return read_trace(
                    path,
                    number,
                    ids=ids,
                    length_divisor=length_divisor,
                    slowdown=slowdown,
                    seed=seed,
                )

    load = make_load(num_prompts, seed)
    warmup = _pick_warmup(load, warmup_requests)
    if slo_tps is not None:
        _search(target, make_load, warmup, slo_tps, max_users, seed, is_json=json)
        return
    arrivals = draw_arrivals(len(load), rate, seed)
    total = sum(len(conversation.turns) for conversation in load)
    records = asyncio.run(_run(target, load, arrivals, warmup, max_concurrency, _make_bar(total)))
    report = summarise(
        records,
        backend=f"openai-{chosen}",
        dataset_name=dataset_name,
        request_rate=rate,
        max_concurrency=max_concurrency,
        objectives=objectives,
    )
    if output_file is not None:
        with output_file.open("ab") as file:
            file.write(msgspec.json.encode(report) + b"\n")
    if output_details is not None:
        output_details.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in records))
    if plot is not None:
        draw_run(records, plot)
    if json:
        print_json(report)
    else:
        sys.stdout.write(render_report(report) + "\n")
    if report.completed == 0:
        raise typer.Exit(1)


async def _run(
    target: Any,
    load: list[Conversation],
    arrivals: list[float],
    warmup: list[Conversation],
    max_concurrency: int | None,
    on_done: Any,
) -> list[RequestRecord]:
    from tandem.bench.clients.client import LoadClient

    client = LoadClient(target)
    try:
        await client.run(warmup, [0.0] * len(warmup))
    finally:
        await client.close()
    client = LoadClient(target, max_concurrency=max_concurrency, on_done=on_done)
    try:
        return await client.run(load, arrivals)
    finally:
        await client.close()


def _search(
    target: Any,
    make_load: Any,
    warmup: list[Conversation],
    slo_tps: float,
    max_users: int,
    seed: int,
    *,
    is_json: bool,
) -> None:
    from tandem.bench.clients.search import find_users

    seeds = count(seed + 1)

    async def measure(users: int) -> float:
        # Each round sends new prompts: with repeated ones the prefix cache would make users faster
        # than new users are.
        load = make_load(users, next(seeds))[:users]
        records = await _run(target, load, [0.0] * len(load), [], None, None)
        errors = [record.error for record in records if record.error]
        speeds = sorted(record.tokens_per_s for record in records)
        if errors or not speeds:
            sys.stderr.write(f"{users} users: {errors[0] if errors else 'no tokens'}\n")
            return 0.0
        slow = find_percentile(speeds, 10)
        sys.stderr.write(f"{users} users: {slow:.1f} tokens/s each\n")
        return slow

    async def search() -> Any:
        if warmup:
            await _run(target, warmup, [0.0] * len(warmup), [], None, None)
        return await find_users(measure, slo_tps=slo_tps, most=max_users)

    found = asyncio.run(search())
    if is_json:
        print_json(found)
        return
    more = ", the most that --max-users allows" if found.is_limited else ""
    sys.stdout.write(
        f"{found.users} users get {slo_tps:g} tokens/s each "
        f"(10th percentile {found.tokens_per_s:.1f}){more}\n"
    )


def _pick_warmup(load: list[Conversation], count: int) -> list[Conversation]:
    """Return requests for warming up, with the workload's lengths and the tokens in reverse order.

    So they leave no cached prefix that the measured requests could reuse.
    """
    firsts = [conversation.turns[0] for conversation in load[:count]]
    return [Conversation([Turn(turn.prompt[::-1], turn.output_length)]) for turn in firsts]


def _read_objectives(words: list[str]) -> Objectives:
    limits: dict[str, float] = {}
    for word in words:
        key, _, value = word.partition(":")
        try:
            limits[key] = float(value)
        except ValueError:
            limits[key] = -1.0
        if key not in ("ttft", "tpot", "tbt", "e2el") or not limits[key] > 0:
            what = f"--goodput {word}: give ttft, tpot, tbt or e2el and milliseconds, as ttft:2000"
            raise ConfigError("bench.serve", what)
    return Objectives(**limits)


def _read_object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError("bench.serve", f"--extra-request-body: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("bench.serve", "--extra-request-body: give a JSON object")
    return value


def _read_ids(text: str) -> IdRange:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError("bench.serve", f"--prompt-ids {text}: give FIRST:LAST, as 300:999")
    return IdRange(int(first), int(last))


def _require_path(path: Path | None, name: str) -> Path:
    if path is None:
        raise ConfigError("bench.serve", f"{name} is a file: give --dataset-path")
    return path


def _make_bar(total: int) -> Any:
    """Return a progress bar of ended requests if standard error is a terminal; otherwise None."""
    if not sys.stderr.isatty():
        return None
    done = 0

    def show(record: RequestRecord) -> None:
        nonlocal done
        del record
        done += 1
        sys.stderr.write(f"\r{done} of {total}" + ("\n" if done == total else ""))

    return show
