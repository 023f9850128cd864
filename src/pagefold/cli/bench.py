"""``pagefold bench``: a workload against any OpenAI-compatible server. Flags are spelled as in ``vllm bench serve``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path  # noqa: TC003 - typer reads it
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagefold.cli.fail import fail
from pagefold.errors import ConfigError, PagefoldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.bench import LoadSettings, Prompt
    from pagefold.bench.client import Client
    from pagefold.bench.record import Record

__all__ = ["bench"]

_BACKENDS = ("openai", "openai-chat")
_CALIBRATION_TOKENS = 200
_NUM_PROMPTS = 100


def bench(  # noqa: PLR0913 - one parameter a flag
    *,
    url: Annotated[str, typer.Option("--url", "--base-url", help="Of the server, such as http://127.0.0.1:8000.")],
    model: Annotated[str, typer.Option(help="To ask for; the server's first if not given.")] = "",
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.")] = "openai",
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="100 if not given, or all of the file.", show_default=False)
    ] = None,
    dataset_path: Annotated[
        Path | None, typer.Option(metavar="FILE", help='JSON lines of {"prompt": ..., "output_tokens": ...}.')
    ] = None,
    input_len: Annotated[
        str,
        typer.Option(
            "--input-len", "--random-input-len", metavar="LENGTH", help="700, 200-800, or lognormal:MEDIAN,P95."
        ),
    ] = "1024",
    output_len: Annotated[
        str, typer.Option("--output-len", "--random-output-len", metavar="LENGTH", help="In the same ways.")
    ] = "128",
    prefix_len: Annotated[
        int,
        typer.Option(
            "--prefix-len", "--random-prefix-len", min=0, help="Tokens that prompts begin with alike, a part of them."
        ),
    ] = 0,
    prefix_share: Annotated[float, typer.Option(min=0, max=1, help="Share of the prompts that begin so.")] = 1.0,
    request_rate: Annotated[float, typer.Option(help="Requests a second (open loop); inf sends all at once.")] = float(
        "inf"
    ),
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: more bursty; more: more even.")] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests under way at once: with --request-rate inf, a closed loop.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Outputs of full length (vLLM's field).")] = False,
    api_key: Annotated[str, typer.Option(help="Sent as a bearer token.")] = "",
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    result_filename: Annotated[
        Path | None,
        typer.Option(
            "--result-filename",
            "--save-result",
            metavar="FILE",
            help="Write the JSON; pagefold plan --from-bench reads it.",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with charts, too.")] = None,
) -> None:
    """Measure a workload: time to first token, inter-token latency, throughput, cached tokens.

    Exit code 1: some requests failed.
    """
    from pagefold.bench import LoadSettings  # noqa: PLC0415 - so that --help answers at once

    try:
        if backend not in _BACKENDS:
            msg = f"backend is {backend!r}."
            raise ConfigError(msg, remedy=f"It must be one of {', '.join(_BACKENDS)}.")
        settings = LoadSettings(
            request_rate=request_rate, burstiness=burstiness, max_concurrency=max_concurrency, seed=seed
        )
        make = _maker(
            num_prompts=num_prompts,
            dataset_path=dataset_path,
            input_len=input_len,
            output_len=output_len,
            prefix_len=prefix_len,
            prefix_share=prefix_share,
            seed=seed,
        )
        client = _client(url, model, backend, api_key, ignore_eos=ignore_eos)
        figures = asyncio.run(_measure(client, make, settings, backend))
        _write(figures, client.url, result_filename, html)
    except PagefoldError as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        _print(figures)
    raise typer.Exit(1 if figures["failed"] else 0)


def _client(url: str, model: str, backend: str, api_key: str, *, ignore_eos: bool) -> Client:
    try:
        from pagefold.bench.client import Client  # noqa: PLC0415 - imports httpx
    except ImportError:
        msg = "To measure a server, httpx must be installed."
        raise ConfigError(msg, remedy="pip install httpx") from None
    return Client(url, model=model, is_chat=backend == "openai-chat", ignore_eos=ignore_eos, api_key=api_key)


def _maker(  # noqa: PLR0913 - the flags of a workload
    *,
    num_prompts: int | None,
    dataset_path: Path | None,
    input_len: str,
    output_len: str,
    prefix_len: int,
    prefix_share: float,
    seed: int,
) -> Callable[[float], list[Prompt]]:
    """Return what makes the prompts once it is told the server's tokens for a word. Bad lengths are refused now."""
    from pagefold.bench import generate_prompts, read_prompts  # noqa: PLC0415
    from pagefold.plan.workload import parse_length  # noqa: PLC0415

    draw_length, draw_output = parse_length("input_len", input_len), parse_length("output_len", output_len)
    if dataset_path is not None:
        default = draw_output(Random(seed))  # noqa: S311 - a workload, no secret
        prompts = read_prompts(dataset_path, num_prompts=num_prompts, output_len=default)
        return lambda _: prompts

    def generate(tokens_per_word: float) -> list[Prompt]:
        if not tokens_per_word:
            msg = "The server counts no tokens of prompts, so none of a wanted length can be made."
            raise ConfigError(msg, remedy="Give prompts as --dataset-path.")
        return generate_prompts(
            num_prompts or _NUM_PROMPTS,
            draw_length,
            draw_output,
            tokens_per_word=tokens_per_word,
            prefix_len=prefix_len,
            prefix_share=prefix_share,
            seed=seed,
        )

    return generate


async def _measure(
    client: Client, make: Callable[[float], list[Prompt]], settings: LoadSettings, backend: str
) -> dict[str, Any]:
    from pagefold.bench import Prompt, generate_prompts, run_load, summarize  # noqa: PLC0415
    from pagefold.bench.prompts import prefix_chains  # noqa: PLC0415

    try:
        await client.find_model()
        (probe,) = generate_prompts(1, lambda _: _CALIBRATION_TOKENS, lambda _: 1, tokens_per_word=1.0, seed=-1)
        prompts = make(await client.tokens_per_word(Prompt(probe.text, 1), _CALIBRATION_TOKENS))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}"),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("requests", total=len(prompts), said="")
            num_tokens = 0

            def show(record: Record) -> None:
                nonlocal num_tokens
                num_tokens += record.output_tokens
                elapsed = bar.tasks[0].elapsed or 0.0
                bar.update(task, advance=1, said=f"{num_tokens / elapsed:.0f} tokens/s" if elapsed else "")

            result = await run_load(client, prompts, settings, on_done=show)
    finally:
        await client.close()
    return summarize(result, settings, backend=backend, model=client.model, chains=prefix_chains(prompts))


def _write(figures: dict[str, Any], url: str, result_filename: Path | None, html: Path | None) -> None:
    from pagefold.bench.summary import bench_page  # noqa: PLC0415

    if result_filename is not None:
        try:
            result_filename.write_text(json.dumps(figures) + "\n", encoding="utf-8")
        except OSError as error:
            msg = f"Cannot write {result_filename}: {error.strerror}."
            raise ConfigError(msg, remedy="Name a file in a folder that can be written.") from None
    if html is not None:
        bench_page(figures, url).write(html)


def _print(figures: dict[str, Any]) -> None:
    from pagefold.bench.summary import print_rows  # noqa: PLC0415

    table = Table("Serving Benchmark Result", box=None, pad_edge=False)
    table.add_column(justify="right")
    for what, value in print_rows(figures):
        table.add_row(what, value, style=None if value else "bold")
    Console().print(table)
    errors = sorted({error for error in figures["errors"] if error})
    for error in errors[:3]:
        typer.echo(f"failed: {error}", err=True)
