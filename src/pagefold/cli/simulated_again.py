"""``pagefold simulate`` of what takes no settings: a recording of a server, done again, and runs with faults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from pagefold.cli.simulated_answer import show_table, shown_progress
from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["hunt_faults", "replay"]

_MOST_DIGITS = 18


def hunt_faults(text: str, *, as_json: bool, is_shown: bool) -> None:
    """Do random runs with faults, and print the test of one that fails."""
    from pagefold.sim.fault_hunt import as_test, hunt  # noqa: PLC0415

    given = {"steps": 10_000, "seed": 0}
    for part in filter(None, text.partition(":")[2].split(",")):
        name, _, number = part.partition("=")
        if name not in given or not number.isdecimal() or len(number) > _MOST_DIGITS:
            msg = f"{part!r} is nothing that faults take."
            raise ConfigError(msg, remedy="They take steps and seed, as faults:steps=10000,seed=1.")
        given[name] = int(number)
    with shown_progress(is_shown=is_shown) as progress:

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


def replay(file: Path, *, as_json: bool, is_shown: bool) -> None:
    """Do again what a server did, and say whether it came to the same."""
    from pagefold.sim.replay_recording import replay_recording  # noqa: PLC0415
    from pagefold.sim.traces.read_recording import read_recording  # noqa: PLC0415

    recording = read_recording(file)
    with shown_progress(is_shown=is_shown) as progress:

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
        show_table(console, f"{recording.name}: {blocks}", rows)
        if not recording.is_whole:
            console.print("The recording was cut off: what there is was replayed.")
    if report.first_difference:
        typer.echo(f"It differs: {report.first_difference}.", err=True)
        raise typer.Exit(1)
