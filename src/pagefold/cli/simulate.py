"""``pagefold simulate``: a trace, or a generated workload, on the real scheduler and cache. No model, no torch."""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from pagefold import __version__
from pagefold.cli.fail import fail
from pagefold.config import EngineConfig, available_cpus
from pagefold.errors import ConfigError, PagefoldError
from pagefold.files.whole import check_writable, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.sim.arrivals import AnyRequest
    from pagefold.sim.comparison import Comparison, Progress
    from pagefold.sim.step_cost import LinearStepCost, RooflineStepCost
    from pagefold.sim.tiers import TierModel
    from pagefold.sim.traces import Trace
    from pagefold.steps import Runner

__all__ = ["simulate"]

_CACHE, _TIERS, _TIME, _TRACE, _ANSWER = "Cache", "Tiers", "Time", "Trace", "Answer"
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,6})?)\s*([kKmMgG]?)")
_CALIBRATED_LEN = 1024
_FAULTS = "faults"
_GB = 1e9
_MOST_DIGITS = 18
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def simulate(  # noqa: PLR0913 - one parameter a flag
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A trace (CSV, JSON lines, a recording of the server), or a generator: "
            "chat, shared, agents, retrieval, bursts, as chat:num_chats=200,seed=1. Or faults:steps=10000,seed=1.",
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
    host_tokens: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="What the host's memory keeps of evicted blocks.", rich_help_panel=_TIERS),
    ] = None,
    disk_tokens: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="What a disk keeps, behind that.", rich_help_panel=_TIERS)
    ] = None,
    token_bytes: Annotated[
        int | None, typer.Option(help="Bytes of KV that a token takes [46080].", rich_help_panel=_TIERS)
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
    asked = _asked(
        ("--policy", policy),
        ("--cache-tokens", cache_tokens),
        ("--block-size", block_size),
        ("--cache-only", cache_only),
        ("--bounds", bounds),
        ("--curve", curve),
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
        ("--step-cost", step_cost),
        ("--model", model),
        ("--device", device),
        ("--calibrate", calibrate),
        ("--max-requests", max_requests),
        ("--html", html),
        ("--png", png),
    )
    from pagefold.sim.comparison import Limits, Question, compare  # noqa: PLC0415 - so that --help answers at once
    from pagefold.sim.traces.read_recording import is_recording  # noqa: PLC0415

    try:
        if png is not None:
            from pagefold.sim.figure import ensure_matplotlib  # noqa: PLC0415

            ensure_matplotlib()
        skip = ("--skip-bad-lines",) if skip_bad_lines else ()
        if trace.partition(":")[0] == _FAULTS and not _is_there(trace):
            _refuse((*asked, *skip), "runs with faults, which draw their own machines")
            _hunt(trace, as_json=as_json, is_shown=not (quiet or as_json))
            return
        if _is_there(trace) and is_recording(Path(trace)):
            _refuse(skip, "a recording: its replay needs every line")
            if not asked:
                _replay(Path(trace), as_json=as_json, is_shown=not (quiet or as_json))
                return
        for file in (html, png, calibrate):
            if file is not None:
                check_writable(file)
        source = _read(trace, skip_bad_lines=skip_bad_lines, max_requests=max_requests)
        machine = _machine(step_cost, model, device, calibrate)
        tiers = _tiers(
            host_tokens=None if host_tokens is None else _num_tokens("host_tokens", host_tokens),
            disk_tokens=None if disk_tokens is None else _num_tokens("disk_tokens", disk_tokens),
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
            cache_tokens=tuple(_num_tokens("cache_tokens", size) for size in _split(cache_tokens))
            or machine.cache_tokens,
            block_size=16 if block_size is None else block_size,
            is_cache_only=cache_only,
            limits=Limits(
                max_num_seqs=defaults.max_num_seqs if max_num_seqs is None else max_num_seqs,
                max_num_batched_tokens=(
                    defaults.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
                ),
            ),
            step_cost=machine.step_cost,
            tiers=tiers,
            with_bounds=bounds,
            sample_rate=curve,
        )
        with _progress(is_shown=not (quiet or as_json)) as progress:
            comparison = compare(question, progress=progress)
        _write(comparison, html, png)
        _print(comparison, source.trace, as_json=as_json)
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


def _hunt(text: str, *, as_json: bool, is_shown: bool) -> None:
    """Do random runs with faults, and print the test of one that fails."""
    from pagefold.sim.fault_hunt import as_test, hunt  # noqa: PLC0415

    given = {"steps": 10_000, "seed": 0}
    for part in filter(None, text.partition(":")[2].split(",")):
        name, _, number = part.partition("=")
        if name not in given or not number.isdecimal() or len(number) > _MOST_DIGITS:
            msg = f"{part!r} is nothing that faults take."
            raise ConfigError(msg, remedy="They take steps and seed, as faults:steps=10000,seed=1.")
        given[name] = int(number)
    with _progress(is_shown=is_shown) as progress:

        def told(num_done: int) -> None:
            if progress is not None:
                progress("steps", num_done, given["steps"])

        found = hunt(given["steps"], seed=given["seed"], progress=told)
    test = None if found is None else as_test(found)
    if as_json:
        typer.echo(json.dumps({**given, "error": found and found.error, "test": test}, indent=2))
    elif test is None:
        typer.echo(f"{given['steps']:,} steps with faults, from seed {given['seed']} on: every invariant held.")
    else:
        typer.echo(test)
    if found is not None:
        typer.echo(f"Seed {found.seed} fails: {found.error}", err=True)
        raise typer.Exit(1)


def _replay(file: Path, *, as_json: bool, is_shown: bool) -> None:
    """Do again what a server did, and say whether it came to the same."""
    from pagefold.sim.replay_recording import replay_recording  # noqa: PLC0415
    from pagefold.sim.traces.read_recording import read_recording  # noqa: PLC0415

    recording = read_recording(file)
    with _progress(is_shown=is_shown) as progress:

        def told(num_done: int) -> None:
            if progress is not None:
                progress("replaying", num_done, len(recording.happened))

        report = replay_recording(recording, progress=told)
    settings = recording.settings
    if as_json:
        told_settings = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
        typer.echo(json.dumps({"trace": recording.name, **told_settings, **report.figures()}, indent=2))
    else:
        rows = [
            ["what", "server and replay"],
            ["requests", f"{report.num_requests:,}, {report.num_cancelled:,} of them cancelled"],
            ["steps", f"{report.num_steps:,}, {report.num_failed_steps:,} of them failed"],
            ["prompt tokens found", f"{report.num_hit_tokens:,} of {report.num_asked_tokens:,}"],
            ["blocks evicted", f"{report.num_evictions:,}"],
            ["requests preempted", f"{report.num_preemptions:,}"],
            ["steps that found and evicted the same", f"{report.num_equal_steps:,}"],
        ]
        blocks = f"{settings.num_blocks:,} blocks of {settings.block_size} tokens, {settings.eviction_policy}"
        console = Console()
        _show(console, f"{recording.name}: {blocks}", rows)
        if not recording.is_whole:
            console.print("The recording was cut off: what there is was replayed.")
    if report.first_difference:
        typer.echo(f"It differs: {report.first_difference}.", err=True)
        raise typer.Exit(1)


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


def _tiers(**given: float | None) -> TierModel:
    """Return the tiers that were asked for.

    Raises:
        ConfigError: something was said of tiers, and there are none; or a value is out of range.
    """
    from pagefold.sim.tiers import TierModel  # noqa: PLC0415

    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if known and not known.get("host_tokens"):
        msg = "Something is said of tiers, and there is no host memory."
        raise ConfigError(msg, remedy="Give --host-tokens: what is evicted goes there first.")
    return TierModel(**known)


def _num_tokens(name: str, text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        msg = f"{name} is {text!r}."
        raise ConfigError(msg, remedy="It must be a number of tokens, such as 500000, 500k or 3M.")
    return round(float(match[1]) * _TIMES[match[2].lower()])


class _Machine(NamedTuple):
    """What a step takes, and how many tokens of KV fit if that is known."""

    step_cost: LinearStepCost | RooflineStepCost
    cache_tokens: tuple[int, ...] = ()


def _machine(file: Path | None, model: str | None, device: str | None, calibration: Path | None) -> _Machine:
    from pagefold.sim.step_cost import LinearStepCost, read_step_cost  # noqa: PLC0415

    if sum(each is not None for each in (file, device, calibration)) > 1:
        msg = "Several flags say what a step takes."
        raise ConfigError(msg, remedy="Give one of --step-cost, --device and --calibrate.")
    if file is not None:
        return _Machine(read_step_cost(file))
    if device is None and calibration is None:
        if model is not None:
            msg = f"A model is named, {model}, but not on what it runs."
            raise ConfigError(msg, remedy="Give --device or --calibrate with it.")
        return _Machine(LinearStepCost())
    if model is None:
        msg = "No model is named."
        raise ConfigError(msg, remedy="Give --model with --device or --calibrate.")
    return _calibrated(calibration, model) if calibration is not None else _planned(str(device), model)


def _planned(device: str, model: str) -> _Machine:
    from pagefold.plan import PlanSettings, find_device, find_model  # noqa: PLC0415
    from pagefold.plan.memory import plan_memory  # noqa: PLC0415
    from pagefold.plan.step_cost import device_step_cost  # noqa: PLC0415
    from pagefold.plan.this_machine import this_cpu  # noqa: PLC0415

    shape = find_model(model)
    found = this_cpu() if device.lower() == "cpu" else find_device(device)
    memory = plan_memory(shape, found, PlanSettings())
    return _Machine(device_step_cost(shape, found, memory), (memory.tightest.capacity.num_tokens,))


def _calibrated(file: Path, model: str) -> _Machine:
    from pagefold.engine.build import build_engine  # noqa: PLC0415 - torch comes with it
    from pagefold.engine.planning import plan_engine  # noqa: PLC0415 - torch comes with it
    from pagefold.sim.calibration import calibrate  # noqa: PLC0415
    from pagefold.sim.step_cost import step_cost_json  # noqa: PLC0415

    config = EngineConfig(model=model, max_model_len=_CALIBRATED_LEN, enable_prefix_caching=False)
    engine = build_engine(plan_engine(config), say=lambda _: None)
    cost = calibrate(engine.scheduler, engine.runner, vocab_size=engine.limits.vocab_size)
    source = f"{model} on {available_cpus()} cores, pagefold {__version__}"
    write_whole(file, step_cost_json(cost, source))
    return _Machine(cost)


@contextmanager
def _progress(*, is_shown: bool) -> Iterator[Progress | None]:
    """Yield what draws a bar on stderr; None where nobody would see it."""
    console = Console(stderr=True)
    if not is_shown or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


def _write(comparison: Comparison, html: Path | None, png: Path | None) -> None:
    from pagefold.sim.html import comparison_page  # noqa: PLC0415

    drawn = None
    if png is not None:
        from pagefold.sim.figure import comparison_png  # noqa: PLC0415

        drawn = comparison_png(comparison)
    if html is not None:
        comparison_page(comparison).write(html)
    if png is not None and drawn is not None:
        write_whole(png, drawn)


def _print(comparison: Comparison, trace: Trace, *, as_json: bool) -> None:
    from pagefold.sim.answer import cache_rows, curve_rows, figures, timed_rows  # noqa: PLC0415

    if as_json:
        told = figures(comparison)
        told |= {"num_bad_lines": trace.num_bad_lines, "prompt_tokens": trace.prompt_tokens}
        typer.echo(json.dumps(told, indent=2))
        return
    console = Console()
    heading = f"{trace.name}: {len(trace.requests):,} requests, {trace.prompt_tokens:,} prompt tokens"
    console.print(heading, markup=False)
    if trace.num_bad_lines:
        console.print(f"{trace.num_bad_lines:,} bad lines were skipped. {trace.first_bad_line}", markup=False)
    more = ", and its share of Belady's" if comparison.bounds is not None else ""
    _show(console, f"Token hit ratio by tokens of the cache{more}", cache_rows(comparison))
    if not comparison.question.is_cache_only:
        if comparison.bounds is not None:
            console.print("Bounds are of prompts alone: what was answered is cached too, and may be found beyond them.")
        _show(console, "What requests met, in virtual time", timed_rows(comparison))
    if comparison.curves is not None:
        _show(console, "Miss-ratio curve of LRU", curve_rows(comparison))
        console.print(f"mean absolute error of the sampled curve: {comparison.curves.error:.5f}")


def _show(console: Console, title: str, rows: list[list[str]]) -> None:
    """Print a table with its head; the title is not bound to its width."""
    head, *body = rows
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", header_style="cyan", no_wrap=True)
    for row in body:
        table.add_row(*row)
    console.print(f"\n{title}", style="italic", highlight=False, markup=False)
    console.print(table)
