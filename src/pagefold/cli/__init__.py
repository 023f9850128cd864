"""The command line. Commands import what is heavy when they run, so that ``pagefold --help`` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from pagefold import __version__
from pagefold.cli import bench, cache, calibrate, demo, evaluate, explain, models, plan, serve, simulate, top, warm
from pagefold.cli.serve_fleet import KeepsArguments

__all__ = ["app"]

app = typer.Typer(
    name="pagefold",
    help="Pagefold serves language models with a paged, shared KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve", cls=KeepsArguments)(serve.serve)
app.command("warm")(warm.warm)
app.command("explain")(explain.explain)
app.command("top")(top.top)
app.add_typer(models.app, name="models")
app.add_typer(cache.app, name="cache")
app.command("eval")(evaluate.evaluate)
app.command("calibrate")(calibrate.calibrate)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)


def _say_version(wanted: bool) -> None:  # noqa: FBT001 - typer's form
    if wanted:
        typer.echo(f"pagefold {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    pass
