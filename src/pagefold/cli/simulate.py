"""``pagefold simulate``: a trace, or a generated workload, on the real scheduler and cache. No model, no torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from pagefold.cli.fail import fail
from pagefold.cli.simulated_again import hunt_faults, replay
from pagefold.cli.simulated_answer import print_comparison, shown_progress, write_pictures
from pagefold.cli.simulated_machine import machine_of, num_tokens, tiers_of
from pagefold.cli.simulated_replicas import OF_ONE_SERVER, compare_fleets, print_fleets
from pagefold.errors import ConfigError, PagefoldError
from pagefold.files.whole import check_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.sim.arrivals import AnyRequest
    from pagefold.sim.traces import Trace
    from pagefold.steps import Runner

__all__ = ["simulate"]

_CACHE, _TIERS, _TIME, _TRACE, _ANSWER = "Cache", "Tiers", "Time", "Trace", "Answer"
_FAULTS = "faults"
_GB = 1e9


def simulate(  # noqa: C901, PLR0913 - one parameter a flag, and who asks for what
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A trace (CSV, JSON lines, a recording of the server), or a generator: "
            "chat, shared, agents, retrieval, bursts, sessions, as chat:num_chats=200,seed=1. Or "
            "faults:steps=10000,seed=1.",
        ),
    ],
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Which cached blocks go first; several, or with commas, are compared. default is what the server "
            "uses; belady knows the future.",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    cache_tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS",
            help="Size of the cache, as 500000, 500k or 3M; several are compared. If not given, parts of what would "
            "never evict.",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens a KV block.", rich_help_panel=_CACHE)] = None,
    cache_only: Annotated[
        bool,
        typer.Option(
            "--cache-only",
            help="Prompts one after another, with no timing, and outputs not cached: as published tables are made.",
            rich_help_panel=_CACHE,
        ),
    ] = False,
    bounds: Annotated[
        bool,
        typer.Option("--bounds", help="Say what Belady's rule and an infinite cache reach.", rich_help_panel=_CACHE),
    ] = False,
    curve: Annotated[
        float | None,
        typer.Option(
            "--curve",
            metavar="RATE",
            help="Miss-ratio curves of LRU: exact, and sampled at that rate (SHARDS), with its error.",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    kv_keep: Annotated[
        float | None,
        typer.Option(
            "--kv-keep",
            metavar="SHARE",
            help="Keep so large a share of the tokens before the last ones, as the server does.",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    host_tokens: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="What the host's memory keeps of evicted blocks.", rich_help_panel=_TIERS),
    ] = None,
    disk_tokens: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="What a disk keeps, behind that.", rich_help_panel=_TIERS)
    ] = None,
    token_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of KV that a token takes [46080: SmolLM2-135M in float32; 23040 in bfloat16].",
            rich_help_panel=_TIERS,
        ),
    ] = None,
    host_bandwidth: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Between host and device [8].", rich_help_panel=_TIERS)
    ] = None,
    disk_bandwidth: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Of reading, and of writing [2].", rich_help_panel=_TIERS)
    ] = None,
    disk_latency: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Of each read [0.0002].", rich_help_panel=_TIERS)
    ] = None,
    fault_rate: Annotated[
        float | None,
        typer.Option(help="Share of the disk's blocks that come back wrong [0].", rich_help_panel=_TIERS),
    ] = None,
    fault_seed: Annotated[int | None, typer.Option(help="Which those are.", rich_help_panel=_TIERS)] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences running at once.", rich_help_panel=_TIME)] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens computed in one step.", rich_help_panel=_TIME)
    ] = None,
    scheduling_policy: Annotated[
        str | None,
        typer.Option(help="Who goes first: fcfs, priority, lpm or fair [fcfs].", rich_help_panel=_TIME),
    ] = None,
    admission: Annotated[
        str | None,
        typer.Option(
            help="When who waits is let in: predicted, prompt or max_tokens [predicted].", rich_help_panel=_TIME
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="So many servers, each with a cache of --cache-tokens, behind one router.",
            rich_help_panel=_TIME,
        ),
    ] = None,
    routing: Annotated[
        list[str] | None,
        typer.Option(
            help="With --replicas: by what requests are routed: prefix, load, round_robin, random; several, or with "
            "commas, are compared [prefix].",
            rich_help_panel=_TIME,
        ),
    ] = None,
    step_cost: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What a step takes, as --calibrate wrote it.", rich_help_panel=_TIME),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --device: of the planner's table, or a config.json.", rich_help_panel=_TIME),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Steps take what --model can take at best on that device.", rich_help_panel=_TIME),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure --model on this machine for some seconds, write what a step takes to FILE, and use it.",
            rich_help_panel=_TIME,
        ),
    ] = None,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Count bad lines, and go on.", rich_help_panel=_TRACE)
    ] = False,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="Take the first so many requests.", rich_help_panel=_TRACE)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel=_ANSWER)
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with charts, too.", rich_help_panel=_ANSWER)
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, too (needs matplotlib).", rich_help_panel=_ANSWER),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.", rich_help_panel=_ANSWER)] = False,
) -> None:
    """Replay TRACE through the real scheduler and KV cache, under a virtual clock, or through the cache alone.

    A recording of the server is replayed step by step if nothing else is asked of it.
    """
    turns = (("--scheduling-policy", scheduling_policy), ("--admission", admission))
    asked = _asked(
        ("--policy", policy),
        ("--cache-tokens", cache_tokens),
        ("--block-size", block_size),
        ("--cache-only", cache_only),
        ("--bounds", bounds),
        ("--curve", curve),
        ("--kv-keep", kv_keep),
        ("--host-tokens", host_tokens),
        ("--disk-tokens", disk_tokens),
        ("--token-bytes", token_bytes),
        ("--host-bandwidth", host_bandwidth),
        ("--disk-bandwidth", disk_bandwidth),
        ("--disk-latency", disk_latency),
        ("--fault-rate", fault_rate),
        ("--fault-seed", fault_seed),
        ("--max-num-seqs", max_num_seqs),
        ("--max-num-batched-tokens", max_num_batched_tokens),
        *turns,
        ("--replicas", replicas),
        ("--routing", routing),
        ("--step-cost", step_cost),
        ("--model", model),
        ("--device", device),
        ("--calibrate", calibrate),
        ("--max-requests", max_requests),
        ("--html", html),
        ("--png", png),
    )
    from pagefold.sim.comparison import Limits, Question, Turns, compare  # noqa: PLC0415 - so that --help answers at once
    from pagefold.sim.traces.read_recording import is_recording  # noqa: PLC0415

    try:
        if png is not None:
            from pagefold.sim.figure import ensure_matplotlib  # noqa: PLC0415

            ensure_matplotlib()
        skip = ("--skip-bad-lines",) if skip_bad_lines else ()
        if trace.partition(":")[0] == _FAULTS and not _is_there(trace):
            _refuse((*asked, *skip), "runs with faults, which draw their own machines")
            hunt_faults(trace, as_json=as_json, is_shown=not (quiet or as_json))
            return
        if _is_there(trace) and is_recording(Path(trace)):
            _refuse(skip, "a recording: its replay needs every line")
            if not asked:
                replay(Path(trace), as_json=as_json, is_shown=not (quiet or as_json))
                return
        if cache_only:
            _refuse(_asked(*turns, ("--replicas", replicas)), "the cache alone, where nobody waits")
        if replicas is None:
            _refuse(_asked(("--routing", routing)), "one server: --replicas is missing")
        else:
            _refuse([flag for flag in asked if flag in OF_ONE_SERVER], "several servers behind a router")
        for file in (html, png, calibrate):
            if file is not None:
                check_writable(file)
        source = _read(trace, skip_bad_lines=skip_bad_lines, max_requests=max_requests)
        machine = machine_of(step_cost, model, device, calibrate)
        tiers = tiers_of(
            host_tokens=None if host_tokens is None else num_tokens("host_tokens", host_tokens),
            disk_tokens=None if disk_tokens is None else num_tokens("disk_tokens", disk_tokens),
            token_bytes=token_bytes,
            host_bytes_per_s=None if host_bandwidth is None else host_bandwidth * _GB,
            disk_bytes_per_s=None if disk_bandwidth is None else disk_bandwidth * _GB,
            disk_latency_s=disk_latency,
            fault_rate=fault_rate,
            seed=fault_seed,
        )
        defaults = Limits()
        question = Question(
            name=source.trace.name,
            requests=source.trace.requests,
            timed=source.timed,
            runner=source.runner,
            policies=_split(policy) or ("default",),
            cache_tokens=tuple(num_tokens("cache_tokens", size) for size in _split(cache_tokens))
            or machine.cache_tokens,
            block_size=16 if block_size is None else block_size,
            is_cache_only=cache_only,
            limits=Limits(
                max_num_seqs=defaults.max_num_seqs if max_num_seqs is None else max_num_seqs,
                max_num_batched_tokens=(
                    defaults.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
                ),
            ),
            turns=Turns(
                admission="predicted" if admission is None else admission,
                scheduling_policy="fcfs" if scheduling_policy is None else scheduling_policy,
            ),
            step_cost=machine.step_cost,
            tiers=tiers,
            rules=machine.rules,
            kv_keep=kv_keep,
            with_bounds=bounds,
            sample_rate=curve,
        )
        with shown_progress(is_shown=not (quiet or as_json)) as progress:
            if replicas is not None:
                fleets = compare_fleets(question, replicas, _split(routing) or ("prefix",), progress)
                print_fleets(fleets, as_json=as_json)
                return
            comparison = compare(question, progress=progress)
        write_pictures(comparison, html, png)
        print_comparison(comparison, source.trace, as_json=as_json)
    except PagefoldError as error:
        fail(error)
    except (MemoryError, OverflowError):
        fail(ConfigError("This is too large for this machine.", remedy="Ask for less: fewer requests or tokens."))


def _asked(*flags: tuple[str, object]) -> tuple[str, ...]:
    """Return the names of those that were given. Zero was given too."""
    return tuple(name for name, value in flags if value is not None and value is not False and value != [])


def _refuse(flags: Sequence[str], what: str) -> None:
    """Refuse flags that would be passed over.

    Raises:
        ConfigError: there are some.
    """
    if flags:
        msg = f"{', '.join(flags)} {'says' if len(flags) == 1 else 'say'} nothing to {what}."
        raise ConfigError(msg, remedy=f"Leave {'it' if len(flags) == 1 else 'them'} out.")


def _is_there(text: str) -> bool:
    return os.path.exists(text)  # noqa: PTH110 - Path.exists raises where a name is too long for a file


class _Source(NamedTuple):
    """What was read: the trace, the same as a server sees it if more is known than ids, and what samples then."""

    trace: Trace
    timed: Sequence[AnyRequest]
    runner: Runner


def _read(text: str, *, skip_bad_lines: bool, max_requests: int | None) -> _Source:
    from pagefold.sim import NullRunner  # noqa: PLC0415
    from pagefold.sim.traces import GENERATORS, parse_workload, read_trace  # noqa: PLC0415
    from pagefold.sim.traces.read_recording import is_recording, read_recording  # noqa: PLC0415

    path = Path(text)
    if is_recording(path):
        recording = read_recording(path)
        known = recording.requests()[:max_requests]
        return _Source(recording.trace(max_requests), known, NullRunner(recording.sampled))
    if text.partition(":")[0] in GENERATORS and not _is_there(text):
        workload = parse_workload(text)
        trace = workload.trace()
        return _Source(
            replace(trace, requests=trace.requests[:max_requests]), workload.generate()[:max_requests], NullRunner()
        )
    return _Source(read_trace(path, skip_bad_lines=skip_bad_lines, max_requests=max_requests), (), NullRunner())


def _split(values: list[str] | None) -> tuple[str, ...]:
    """Return what a flag that may come several times, or with commas, says; each once."""
    parts = (part.strip() for value in values or () for part in value.split(","))
    return tuple(dict.fromkeys(part for part in parts if part))
