"""``pagefold plan``: what fits, what it costs and what to switch on. Reads configs only: no torch, no GPU."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pagefold.cli.fail import fail
from pagefold.cli.options import parse_layers, parse_speculation
from pagefold.cli.plan_check import Given, check_server, check_start
from pagefold.cli.size import parse_size
from pagefold.errors import ConfigError, DoesNotFitError, PagefoldError
from pagefold.speculation.params import SpeculativeParams  # noqa: TC001 - typer reads it

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagefold.plan import Device, Plan, Question, Workload
    from pagefold.plan.advice import Advice

__all__ = ["plan"]

_REFUSED = 3
"""Exit code of a plan that does not fit: the question was good, the answer is no."""
_UNCERTAIN = 4
"""Exit code of a plan that fits only where all is favourable."""

_SLOWEST, _LARGEST = 1e6, 1e21
"""Bytes, bytes a second, operations a second: beyond these it is a slip of the pen."""

_MODEL, _DEVICE, _SETTINGS, _WORKLOAD, _ANSWER = "Model", "Device", "Settings", "Workload", "Answer"


def plan(  # noqa: PLR0913 - one parameter a flag
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A hub id or name of the table, a folder, or a config.json.", show_default=False
        ),
    ] = None,
    *,
    device: Annotated[
        str | None, typer.Option(help="A name of the table, or cpu for this machine.", rich_help_panel=_DEVICE)
    ] = None,
    device_memory: Annotated[
        int | None, typer.Option(parser=parse_size, metavar="SIZE", help="Memory of a device.", rich_help_panel=_DEVICE)
    ] = None,
    device_bandwidth: Annotated[
        int | None,
        typer.Option(parser=parse_size, metavar="SIZE", help="Bytes a second of its memory.", rich_help_panel=_DEVICE),
    ] = None,
    device_flops: Annotated[
        float | None,
        typer.Option(help="Operations a second of dense products in 16 bit, such as 989e12.", rich_help_panel=_DEVICE),
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Of one device.", rich_help_panel=_DEVICE)] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.", rich_help_panel=_SETTINGS)] = "auto",
    weight_dtype: Annotated[
        str,
        typer.Option(
            help="How the weights' file is stored: auto, fp16, fp8, int8, int4, int4-g128, ...",
            rich_help_panel=_SETTINGS,
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="auto, fp8, int8_per_token_head, k8v4, int4_per_token_head, kivi2, nvfp4, ...",
            rich_help_panel=_SETTINGS,
        ),
    ] = "auto",
    kv_cache_dtype_skip_layers: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS", help="Layers that stay in 16 bit all the same, such as 0,29.", rich_help_panel=_SETTINGS
        ),
    ] = None,
    streaming_llm: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="A window for all layers, beside sinks.", rich_help_panel=_SETTINGS),
    ] = None,
    streaming_llm_sinks: Annotated[
        int, typer.Option(metavar="TOKENS", help="How many first tokens these are.", rich_help_panel=_SETTINGS)
    ] = 4,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.", rich_help_panel=_SETTINGS)] = 16,
    engine: Annotated[
        str,
        typer.Option(
            help="Whose memory is planned: vllm==VERSION, pagefold; auto is the newest vLLM that is known on a GPU.",
            rich_help_panel=_SETTINGS,
        ),
    ] = "auto",
    enforce_eager: Annotated[bool, typer.Option(help="Without CUDA graphs.", rich_help_panel=_SETTINGS)] = False,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of a GPU's memory for weights, activations and KV together; the engine's own if not given.",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="KV budget of a device; what is left if not given.",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    max_model_len: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS|auto",
            help="Longest prompt and output together; auto for as much as fits.",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Sequences running at once; the engine's own if not given.", rich_help_panel=_SETTINGS),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens computed in one step; the engine's own if not given.", rich_help_panel=_SETTINGS),
    ] = None,
    tensor_parallel_size: Annotated[
        int,
        typer.Option("--tensor-parallel-size", "-tp", help="Devices that share each layer.", rich_help_panel=_SETTINGS),
    ] = 1,
    pipeline_parallel_size: Annotated[
        int,
        typer.Option(
            "--pipeline-parallel-size", "-pp", help="Stages that share the layers.", rich_help_panel=_SETTINGS
        ),
    ] = 1,
    speculative_config: Annotated[
        SpeculativeParams | None,
        typer.Option(
            parser=parse_speculation,
            metavar="JSON",
            help='Who drafts, as the server takes it on a CPU, such as {"model": "MODEL"}.',
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    input_len: Annotated[
        str,
        typer.Option(
            metavar="LENGTH", help="Prompt tokens: 700, 200-800, or lognormal:MEDIAN,P95.", rich_help_panel=_WORKLOAD
        ),
    ] = "1024",
    output_len: Annotated[
        str, typer.Option(metavar="LENGTH", help="Output tokens, in the same ways.", rich_help_panel=_WORKLOAD)
    ] = "128",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lengths from a trace: CSV or JSON lines.", rich_help_panel=_WORKLOAD),
    ] = None,
    from_bench: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Lengths and sharing as pagefold bench measured them, and advice from it.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    prefix_len: Annotated[
        int,
        typer.Option(help="Tokens that prompts begin with alike, a part of their length.", rich_help_panel=_WORKLOAD),
    ] = 0,
    prefix_share: Annotated[
        float, typer.Option(help="Share of the requests that begin so.", rich_help_panel=_WORKLOAD)
    ] = 1.0,
    turns: Annotated[int, typer.Option(help="Requests of one conversation.", rich_help_panel=_WORKLOAD)] = 1,
    pause: Annotated[
        float, typer.Option(help="Seconds between an answer and the next question.", rich_help_panel=_WORKLOAD)
    ] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel=_ANSWER)
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with charts, too.", rich_help_panel=_ANSWER)
    ] = None,
    check_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read a start's log, of vLLM or Pagefold: what is planned beside what it found, and why they differ.",
            rich_help_panel=_ANSWER,
        ),
    ] = None,
    from_server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The same of a running server, from its metrics; and what its prompts would find with other sizes.",
            rich_help_panel=_ANSWER,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="For that server: the admin's, or a client's.", rich_help_panel=_ANSWER),
    ] = None,
    list_tables: Annotated[
        bool,
        typer.Option(
            "--list", help="Show the tables of models and devices, with their sources.", rich_help_panel=_ANSWER
        ),
    ] = False,
) -> None:
    """Say what fits of MODEL on a device, what it costs, and what to switch on.

    Exit code 3: it does not fit; the nearest settings that do are named. Exit code 4: it may not fit.
    """
    from pagefold.cli.planned_model import planned_model  # noqa: PLC0415 - so that --help answers at once
    from pagefold.plan import PlanSettings, Question  # noqa: PLC0415 - likewise

    if list_tables:
        _print_tables()
        return
    try:
        asked: dict[str, Any] = {
            "dtype": dtype,
            "weight_dtype": weight_dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "kv_cache_dtype_skip_layers": parse_layers(kv_cache_dtype_skip_layers),
            "streaming_llm": streaming_llm,
            "streaming_llm_sinks": streaming_llm_sinks,
            "block_size": block_size,
            "engine": engine,
            "enforce_eager": enforce_eager,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "max_model_len": _num_tokens(max_model_len),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "speculative_config": speculative_config,
        }
        if api_key is not None and from_server is None:
            msg = "--api-key is given, and no server."
            raise ConfigError(msg, remedy="Leave it out, or give --from-server URL.")
        if check_log is not None or from_server is not None:
            names = _given_beside(context, asked)
            known = None
            if device is not None or device_memory is not None:
                known = _device(device, device_memory, None, None)
            given = Given(model, known, {name: asked[name] for name in names})
            if check_log is not None:
                check_start(check_log, given, as_json=as_json)
            else:
                check_server(str(from_server), api_key, given, as_json=as_json)
            return
        if model is None:
            msg = "No model is named."
            raise ConfigError(msg, remedy="pagefold plan MODEL --device NAME; pagefold plan --list shows both tables.")
        if price_per_hour is not None and not 0 <= price_per_hour < float("inf"):
            msg = f"price_per_hour is {price_per_hour}."
            raise ConfigError(msg, remedy="It must be a number, at least 0.")
        shape = planned_model(model)
        workload = _workload(
            input_len=input_len,
            output_len=output_len,
            trace=trace,
            from_bench=from_bench,
            prefix_len=prefix_len,
            prefix_share=prefix_share,
            turns=turns,
            pause=pause,
        )
        question = Question(
            shape=shape,
            device=_device(device, device_memory, device_bandwidth, device_flops),
            settings=PlanSettings(**asked),
            workload=workload,
            price_per_hour=price_per_hour,
        )
        _answer(question, from_bench, html, as_json=as_json)
    except PagefoldError as error:
        fail(error)


def _given_beside(context: typer.Context, settings: Mapping[str, Any]) -> list[str]:
    """Return which settings were given beside a log or a server.

    Raises:
        ConfigError: a flag was given that says nothing of a start.
    """
    flags = {str(one.name): one.opts[0] for one in context.command.params}
    given = [name for name in flags if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if "check_log" in given and "from_server" in given:
        msg = "Both a log and a server are given."
        raise ConfigError(msg, remedy="Give --check-log or --from-server.")
    allowed = {*settings, "model", "device", "device_memory", "as_json", "check_log", "from_server", "api_key"}
    idle = next((name for name in given if name not in allowed), None)
    if idle is not None:
        msg = f"{flags[idle]} is given, and has no effect on a start."
        raise ConfigError(msg, remedy="Leave it out beside --check-log and --from-server.")
    return [name for name in given if name in settings]


def _num_tokens(text: str | None) -> int | Literal["auto"] | None:
    if text is None or text == "auto":
        return cast('Literal["auto"] | None', text)
    try:
        return int(text)
    except ValueError:
        msg = f"max_model_len is {text!r}."
        raise ConfigError(msg, remedy="It must be a number of tokens, or auto.") from None


def _device(name: str | None, memory: int | None, bandwidth: int | None, flops: float | None) -> Device:
    from dataclasses import replace  # noqa: PLC0415

    from pagefold.plan import Device, find_device  # noqa: PLC0415
    from pagefold.plan.this_machine import this_cpu  # noqa: PLC0415

    for what, value, least in (
        ("device_memory", memory, 1),
        ("device_bandwidth", bandwidth, _SLOWEST),
        ("device_flops", flops, _SLOWEST),
    ):
        if value is not None and not least <= value <= _LARGEST:
            msg = f"{what} is {value}."
            raise ConfigError(msg, remedy=f"It must be a positive number, from {least:g} to {_LARGEST:g}.")
    if name is None:
        if memory is None:
            msg = "No device is named."
            raise ConfigError(msg, remedy="Give --device NAME (such as H100-80GB, or cpu), or --device-memory SIZE.")
        found = Device(name=f"a device of {memory / 1e9:g} GB", memory_bytes=memory, source="as given")
    else:
        found = this_cpu() if name.lower() == "cpu" else find_device(name)
    if memory is not None:
        found = found.with_memory(memory)
    return replace(
        found,
        bandwidth=found.bandwidth if bandwidth is None else float(bandwidth),
        flops_16=found.flops_16 if flops is None else flops,
        flops_8=found.flops_8 if flops is None else None,
        flops_32=found.flops_32 if flops is None else None,
    )


def _workload(  # noqa: PLR0913 - the flags of a workload
    *,
    input_len: str,
    output_len: str,
    trace: Path | None,
    from_bench: Path | None,
    prefix_len: int,
    prefix_share: float,
    turns: int,
    pause: float,
) -> Workload:
    from pagefold.plan import DEFAULT_WORKLOAD, Workload, draw_lengths  # noqa: PLC0415
    from pagefold.plan.trace import trace_workload  # noqa: PLC0415

    if trace is not None and from_bench is not None:
        msg = "Both a trace and a measurement are given."
        raise ConfigError(msg, remedy="Give --trace or --from-bench.")
    if from_bench is not None:
        from pagefold.plan.advice import workload_of_bench  # noqa: PLC0415

        return workload_of_bench(from_bench)
    if trace is not None:
        recorded = trace_workload(trace)
        name, lengths = recorded.name, recorded.lengths
        if not prefix_len:
            prefix_len, prefix_share = recorded.prefix_len, recorded.prefix_share
    else:
        name, lengths = f"{input_len} tokens in, {output_len} out", draw_lengths(input_len, output_len)
        if lengths == DEFAULT_WORKLOAD.lengths:
            name = DEFAULT_WORKLOAD.name
    more = f", {prefix_len} of them alike in {prefix_share:.0%} of the requests" if prefix_len and trace is None else ""
    more += f", {turns} turns with pauses of {pause:g} s" if turns > 1 else ""
    return Workload(
        name=name + more,
        lengths=lengths,
        prefix_len=prefix_len,
        prefix_share=prefix_share,
        turns=turns,
        pause_s=pause,
    )


def _answer(question: Question, from_bench: Path | None, html: Path | None, *, as_json: bool) -> None:
    from pagefold.plan import make_plan, nearest_settings  # noqa: PLC0415
    from pagefold.plan.html import plan_page  # noqa: PLC0415
    from pagefold.plan.report import figures, refusal_figures, remedy_lines  # noqa: PLC0415

    try:
        made = make_plan(question)
    except DoesNotFitError as error:
        remedies = nearest_settings(question)
        if as_json:
            typer.echo(json.dumps(refusal_figures(error.message, error.missing_bytes, remedies), indent=2))
        else:
            styled = typer.style("does not fit:", fg="red", bold=True)
            typer.echo(f"{styled} {error.message} {error.missing_bytes:,} bytes are missing.", err=True)
            for line in remedy_lines(remedies):
                typer.echo(line, err=True)
        raise typer.Exit(_REFUSED) from error
    page = plan_page(made)
    advice = None
    if from_bench is not None:
        from pagefold.plan.advice import advise  # noqa: PLC0415

        advice = advise(from_bench, made)
        page.heading("Advice from the measurement")
        page.table([(each.what, each.advice, each.why) for each in advice], ("what", "advice", "why"))
    if html is not None:
        page.write(html)
    if as_json:
        more = {} if advice is None else {"advice": [each.figures() for each in advice]}
        typer.echo(json.dumps(figures(made) | more, indent=2))
    else:
        _print(made, advice, html)
    if not made.memory.fits:
        raise typer.Exit(_UNCERTAIN)


def _print(made: Plan, advice: Sequence[Advice] | None, html: Path | None) -> None:
    console = Console()
    console.print(_screen(made))
    if advice is not None:
        table = Table("what", "advice", "why", title="Advice from the measurement", title_justify="left", box=None)
        for each in advice:
            table.add_row(each.what, each.advice, each.why)
        console.print(table)
    if html is not None:
        typer.echo(f"{html} has it with charts.")


def _screen(made: Plan) -> Group:
    from pagefold.plan.report import headline, notes, sections, technique_rows  # noqa: PLC0415

    parts: list[Text | Table] = [Text(headline(made), style="bold")]
    for section in sections(made):
        table = Table(title=f"\n{section.title}", title_justify="left", box=None, show_header=False, pad_edge=False)
        table.add_column(style="cyan", overflow="fold")
        table.add_column(overflow="fold")
        for what, how in section.rows:
            table.add_row(Text(what), Text(how))
        parts.append(table)
    if made.techniques:
        parts.append(Text("\nWhat more could be had, the best first", style="italic"))
    for number, (name, gain, flags, worth, said) in enumerate(technique_rows(made), start=1):
        line = Text(f"{number:2}. ").append(name, style="cyan").append(f": {gain}")
        line.append(f"; worth {worth} a month" if worth else "").append(f"\n    {flags}", style="bold")
        parts.append(line.append(f"\n    {said}" if said else "", style="bright_black"))
    parts += [Text(f"\n{note}" if index == 0 else note, style="bright_black") for index, note in enumerate(notes(made))]
    return Group(*parts)


def _print_tables() -> None:
    from pagefold.plan import device_names, find_device, find_model, model_names  # noqa: PLC0415

    console = Console()
    models = Table(
        "model", "parameters", "layers", "KV heads", "positions", "source", title="Models", title_justify="left"
    )
    for name in model_names():
        shape = find_model(name)
        heads = max(layer.num_kv_heads for layer in shape.kv_layers)
        parameters = f"{shape.num_parameters / 1e9:,.2f} B"
        models.add_row(name, parameters, str(len(shape.layers)), str(heads), f"{shape.max_positions:,}", shape.source)
    console.print(models)
    devices = Table("device", "memory", "bandwidth", "16 bit", "source", title="Devices", title_justify="left")
    for name in device_names():
        found = find_device(name)
        assert found.bandwidth is not None
        assert found.flops_16 is not None
        numbers = (
            f"{found.nominal_bytes / 1e9:.0f} GB, {found.memory_bytes / 2**30:.2f} GiB",
            f"{found.bandwidth / 1e12:.2f} TB/s",
            f"{found.flops_16 / 1e12:.0f} TFLOPS",
        )
        devices.add_row(name, *numbers, found.source)
    console.print(devices)
