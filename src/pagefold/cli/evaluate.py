"""``pagefold eval``: what a KV codec, a number format, a window, or a share of older tokens costs on a model."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, cast

import typer
from rich.console import Console

from pagefold.cli.fail import fail
from pagefold.cli.fit_scorer import fit_scorer
from pagefold.cli.models import progress_bar
from pagefold.cli.options import MODEL_HELP, parse_layers
from pagefold.cli.serve import check_installed, quiet_transformers
from pagefold.config import DROPPED_BITS, EngineConfig, cache_dir
from pagefold.engine.verdicts import (
    SAME_AS,
    Verdict,
    floor_of,
    format_floor_of,
    keep_floor_of,
    subject_of,
    write_verdict,
)
from pagefold.errors import ConfigError, NotCalibratedError, PagefoldError
from pagefold.files.whole import check_writable, write_whole
from pagefold.kv import KV_CACHE_DTYPES
from pagefold.masks.rule import CHUNK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagefold.config import AttentionBackend, Device, Dtype, ModelImpl, TransportCodec
    from pagefold.hub.progress import Progress
    from pagefold.quality.result import Evaluation
    from pagefold.quality.setting import Setting
    from pagefold.quality.texts import Text

__all__ = ["NUMBER_FORMATS", "evaluate"]

NUMBER_FORMATS: Mapping[str, Mapping[str, object]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "w8a8_int8": {"quantization": "w8a8_int8"},
}
"""What an engine can be asked to compute in, beside its own dtype; two go together with a plus."""

_CODEC_FIELDS = "kv_cache_dtype", "kv_cache_dtype_skip_layers"

_WHAT, _TEXT, _ANSWER, _ENGINE = "What is evaluated", "Text", "Answer", "Engine"


def evaluate(  # noqa: PLR0913 - one parameter a flag
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = "smollm2-135m",
    *,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="CODECS",
            help="Codecs, with commas: int8_per_token_head,fp8_e4m3. All that have a quality floor if not given.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    kv_cache_dtype_skip_layers: Annotated[
        str | None,
        typer.Option(metavar="LAYERS", help="Layers that stay in 16 bit, such as 0,29.", rich_help_panel=_WHAT),
    ] = None,
    kv_transport_codec: Annotated[
        str,
        typer.Option(
            metavar="CODECS",
            help="As if blocks had come back from a pool so packed, with commas: none,lossy7,lossy6.",
            rich_help_panel=_WHAT,
        ),
    ] = "none",
    number_formats: Annotated[
        str | None,
        typer.Option(
            metavar="FORMATS",
            help="What the fused decoder computes in, with commas, against the exact one: bfloat16,int8,w8a8_int8,"
            "bfloat16+w8a8_int8.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    streaming_llm: Annotated[
        str | None,
        typer.Option(
            metavar="WINDOWS",
            help="Windows of StreamingLLM beside the first tokens, with commas: 256,1020.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    streaming_llm_sinks: Annotated[
        int, typer.Option(metavar="TOKENS", help="How many first tokens.", rich_help_panel=_WHAT)
    ] = 4,
    kv_keep: Annotated[
        str | None,
        typer.Option(
            metavar="SHARES",
            help="Shares of older tokens that are kept, with commas: 0.5,0.25. Each is evaluated alone, and with each "
            "codec that --kv-cache-dtype names.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8; State of the Union addresses and Moby-Dick if not given, fetched once.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    context_len: Annotated[int, typer.Option(help="Tokens of a context.", rich_help_panel=_TEXT)] = 2048,
    num_contexts: Annotated[
        int | None, typer.Option(help="How many; 8 if not given and the text has them.", rich_help_panel=_TEXT)
    ] = None,
    greedy_tokens: Annotated[
        int, typer.Option(help="Of each greedy continuation; 0 for none.", rich_help_panel=_TEXT)
    ] = 64,
    needles: Annotated[
        int, typer.Option(help="Needles at each of five depths; 0 for none.", rich_help_panel=_TEXT)
    ] = 2,
    num_bins: Annotated[int, typer.Option(help="Into which positions are put.", rich_help_panel=_TEXT)] = 8,
    seed: Annotated[int, typer.Option(help="Of needles and resampling.", rich_help_panel=_TEXT)] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel=_ANSWER)
    ] = False,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a picture, too.", rich_help_panel=_ANSWER)
    ] = None,
    recommend: Annotated[
        bool,
        typer.Option("--recommend", help="Name the smallest codec within the bound.", rich_help_panel=_ANSWER),
    ] = False,
    max_perplexity_change: Annotated[
        float,
        typer.Option(metavar="SHARE", help="That bound: 0.01 is one percent.", rich_help_panel=_ANSWER),
    ] = 0.01,
    kv_quality_floor: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Top-1 agreement, as pagefold serve has it.", rich_help_panel=_ANSWER),
    ] = None,
    save: Annotated[
        bool,
        typer.Option(help="Keep the verdicts in the cache folder, where serve reads them.", rich_help_panel=_ANSWER),
    ] = True,
    device: Annotated[
        str, typer.Option(help="auto takes a card where there is one: auto, cpu or cuda.", rich_help_panel=_ENGINE)
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, float64, bfloat16 or float16.", rich_help_panel=_ENGINE)
    ] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.", rich_help_panel=_ENGINE)] = 16,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens computed in one step: long texts are read in chunks.", rich_help_panel=_ENGINE)
    ] = 512,
    attention_backend: Annotated[
        str, typer.Option(help="auto, cpu, cuda or reference.", rich_help_panel=_ENGINE)
    ] = "auto",
    model_impl: Annotated[
        str, typer.Option(help="Who computes the layers: auto, pagefold or transformers.", rich_help_panel=_ENGINE)
    ] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="int8 or w8a8_int8, on both sides.", rich_help_panel=_ENGINE)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads that compute; all cores if not given.", rich_help_panel=_ENGINE)
    ] = None,
) -> None:
    """Measure what codecs of MODEL's KV, number formats, windows and shares cost, beside the exact cache of the run."""
    try:
        check_installed()
        config = EngineConfig(
            model=model,
            dtype=cast("Dtype", dtype),  # the config checks it
            block_size=block_size,
            kv_quality_floor=kv_quality_floor,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=min(8, max(1, max_num_batched_tokens)),
            device=cast("Device", device),
            attention_backend=cast("AttentionBackend", attention_backend),
            model_impl=cast("ModelImpl", model_impl),
            quantization=cast("Literal['int8', 'w8a8_int8'] | None", quantization),
            threads=threads,
        )
        layers = parse_layers(kv_cache_dtype_skip_layers)
        if png is not None:
            from pagefold.quality.figure import ensure_matplotlib  # noqa: PLC0415 - only here

            ensure_matplotlib()
            check_writable(png)
        if not max_perplexity_change >= 0:
            msg = f"max_perplexity_change is {max_perplexity_change}."
            raise ConfigError(msg, remedy="Give a share, such as 0.01 for one percent.")
        from pagefold.quality.evaluate import Question  # noqa: PLC0415 - torch comes with it
        from pagefold.quality.evaluate import evaluate as run  # noqa: PLC0415

        transports = _transports(kv_transport_codec)
        windows = _window_settings(config, streaming_llm, streaming_llm_sinks, context_len)
        shares = _share_settings(config, kv_keep, _Stored(kv_cache_dtype, layers, transports), context_len)
        asked = _Asked(kv_cache_dtype, layers, transports, number_formats, windows | shares)
        config, settings = _compared(config, asked)
        quiet_transformers(is_loaded=True)
        with progress_bar() as progress:
            question = Question(
                settings=list(settings.values()),
                texts=_texts(text, progress, leaves_reserved=bool(shares)),
                context_len=context_len,
                num_contexts=num_contexts,
                num_greedy_tokens=greedy_tokens,
                num_haystacks=needles,
                num_bins=num_bins,
                seed=seed,
            )
            try:
                evaluation = run(config, question, progress=progress)
            except NotCalibratedError:  # nothing else is in the way
                fit_scorer(model, progress, threads=threads)
                evaluation = run(config, question, progress=progress)
        if png is not None:
            from pagefold.quality.figure import evaluation_png  # noqa: PLC0415 - matplotlib comes with it

            write_whole(png, evaluation_png(evaluation))
        floors = {name: _floor(setting, config) for name, setting in settings.items()}
        told = _recommended(evaluation, max_perplexity_change, settings, floors) if recommend else None
        _print(evaluation, floors, told, as_json=as_json)
        if save:
            _save(evaluation, config, settings)
    except PagefoldError as error:
        fail(error)


class _Stored(NamedTuple):
    """How K and V are to be stored, as flags say it."""

    kv_cache_dtype: str | None
    layers: tuple[int, ...]
    transports: Sequence[TransportCodec]


class _Asked(NamedTuple):
    """What is to be evaluated, as flags say it."""

    kv_cache_dtype: str | None
    layers: tuple[int, ...]
    transports: Sequence[TransportCodec]
    number_formats: str | None
    masks: Mapping[str, Setting]


def _compared(config: EngineConfig, asked: _Asked) -> tuple[EngineConfig, dict[str, Setting]]:
    """Return the config of what is exact, and what is compared with it, by name.

    Raises:
        ConfigError: there is no such thing, or two are compared with different ones.
    """
    settings = _format_settings(config, asked.number_formats)
    if settings:
        others = {"codecs": asked.kv_cache_dtype, "windows and shares": asked.masks}
        for what, named in others.items():
            if named and config.dtype == "auto":
                msg = f"number_formats are compared with float32, and {what} with what a server computes."
                raise ConfigError(msg, remedy="Evaluate each in a run of its own, or give --dtype float32.")
        config = replace(config, dtype="float32")
    settings |= asked.masks
    if asked.kv_cache_dtype is not None or not settings:
        settings |= _settings(config, asked.kv_cache_dtype, asked.layers, asked.transports)
    elif list(asked.transports) != _transports("none"):
        msg = "kv_transport_codec is given, and nothing is evaluated whose blocks are packed."
        raise ConfigError(msg, remedy="Give --kv-cache-dtype too, or leave it out.")
    return config, settings


def _transports(names: str) -> list[TransportCodec]:
    """Return what was named.

    Raises:
        ConfigError: there is no such transport codec.
    """
    found = [name.strip() for name in names.split(",")]
    for name in found:
        if name not in DROPPED_BITS:
            msg = f"There is no kv_transport_codec {name!r}."
            raise ConfigError(msg, remedy=f"It is one of {', '.join(DROPPED_BITS)}.")
    return cast("list[TransportCodec]", found)


def _settings(
    config: EngineConfig, codecs: str | None, layers: tuple[int, ...], transports: Sequence[TransportCodec]
) -> dict[str, Setting]:
    """Return what is evaluated, by name. Codecs that the model cannot have are left out if none was named."""
    from pagefold.engine.planning import plan_engine  # noqa: PLC0415 - torch comes with it
    from pagefold.quality.rounding import check_rounds  # noqa: PLC0415
    from pagefold.quality.setting import Setting  # noqa: PLC0415

    named = [name.strip() for name in codecs.split(",")] if codecs is not None else None
    names = named or [name for name in dict.fromkeys(KV_CACHE_DTYPES.values()) if name not in SAME_AS]
    settings: dict[str, Setting] = {}
    for name, transport in product(names, transports):
        of_codec: dict[str, object] = {"kv_cache_dtype": name}
        if layers and name != "auto":
            of_codec["kv_cache_dtype_skip_layers"] = layers
        called = "auto again" if name == "auto" else name
        setting = Setting(called if transport == "none" else f"{called}, {transport}", of_codec, transport)
        try:
            applied = setting.apply(config)
            if DROPPED_BITS[transport] or (named is None and _has_floor(applied)):
                check_rounds(transport, plan_engine(applied).geometry)
        except ConfigError as error:
            if named is not None:
                raise
            typer.echo(f"left out: {error}", err=True)
            continue
        if named is not None or _has_floor(applied):
            settings[setting.name] = setting
    return settings


def _format_settings(config: EngineConfig, formats: str | None) -> dict[str, Setting]:
    """Return the number formats that are evaluated, by name.

    Raises:
        ConfigError: there is none of that name, or there is nothing exact to compare it with.
    """
    from pagefold.quality.setting import Setting  # noqa: PLC0415

    if formats is None:
        return {}
    if config.quantization is not None:
        msg = f"number_formats are compared with numbers as they are, and quantization is {config.quantization}."
        raise ConfigError(msg, remedy="Leave one of them out.")
    if config.dtype not in {"auto", "float32"}:
        msg = f"number_formats are compared with float32, and dtype is {config.dtype}."
        raise ConfigError(msg, remedy="Leave dtype out; bfloat16+w8a8_int8 is a number format.")
    settings: dict[str, Setting] = {}
    for name in map(str.strip, formats.split(",")):
        overrides: dict[str, object] = {}
        for part in name.split("+"):
            if part not in NUMBER_FORMATS:
                msg = f"There is no number format {part!r}."
                raise ConfigError(msg, remedy=f"It is one of {', '.join(NUMBER_FORMATS)}, or two with a plus.")
            if overrides.keys() & NUMBER_FORMATS[part].keys():
                msg = f"number_formats has {name!r}, of which each would take the other's place."
                raise ConfigError(msg, remedy="Join bfloat16 and one format of weights, as in bfloat16+w8a8_int8.")
            overrides |= NUMBER_FORMATS[part]
        setting = Setting(f"numbers in {name}", overrides)
        settings[setting.name] = setting
    return settings


def _window_settings(config: EngineConfig, windows: str | None, num_sinks: int, context_len: int) -> dict[str, Setting]:
    """Return the windows that are evaluated, by name.

    Raises:
        ConfigError: one is no number, cannot be, or hides nothing of a context.
    """
    from pagefold.quality.setting import Setting  # noqa: PLC0415

    settings: dict[str, Setting] = {}
    for window in map(str.strip, windows.split(",") if windows is not None else ()):
        if not window.isdecimal():
            msg = f"streaming_llm has {window!r}, which is no number of tokens."
            raise ConfigError(msg, remedy="Give whole numbers with commas, such as 256,1020.")
        overrides = {"streaming_llm": int(window), "streaming_llm_sinks": num_sinks}
        setting = Setting(f"streaming_llm {int(window)}", overrides)
        setting.apply(config)
        if int(window) + num_sinks >= context_len:
            msg = f"streaming_llm has {window}, which with {num_sinks} sinks hides nothing of {context_len} tokens."
            raise ConfigError(msg, remedy="Give a smaller window, or a longer --context-len.")
        settings[setting.name] = setting
    return settings


def _share_settings(config: EngineConfig, shares: str | None, stored: _Stored, context_len: int) -> dict[str, Setting]:
    """Return the shares of older tokens that are evaluated, by name: each alone, and with each codec that is named.

    Raises:
        ConfigError: one is no share, cannot be, or keeps all of a context.
    """
    from pagefold.quality.setting import Setting  # noqa: PLC0415

    settings: dict[str, Setting] = {}
    if shares is not None and context_len <= 2 * CHUNK:
        msg = f"kv_keep is given, and of contexts of {context_len} tokens all are kept: {2 * CHUNK} are anyway."
        raise ConfigError(msg, remedy=f"Give a --context-len above {2 * CHUNK}.")
    if shares is not None and list(stored.transports) != _transports("none"):
        msg = "kv_keep and kv_transport_codec are given, and what is packed for a pool is none of a share yet."
        raise ConfigError(msg, remedy="Evaluate each in a run of its own.")
    names = stored.kv_cache_dtype.split(",") if stored.kv_cache_dtype is not None else ()
    codecs = ["auto", *(name.strip() for name in names if name.strip() != "auto")]
    for share, codec in product(shares.split(",") if shares is not None else (), codecs):
        try:
            overrides: dict[str, object] = {"kv_keep": (float(share),)}
        except ValueError:
            msg = f"kv_keep has {share.strip()!r}, which is no share."
            raise ConfigError(msg, remedy="Give numbers between 0 and 1 with commas, such as 0.5,0.25.") from None
        name = f"kv_keep {float(share)}"
        if codec != "auto":
            overrides |= {"kv_cache_dtype": codec, "kv_cache_dtype_skip_layers": stored.layers}
            name = f"{name}, {codec}"
        settings[name] = Setting(name, overrides)
        settings[name].apply(config)
    return settings


def _floor(setting: Setting, config: EngineConfig) -> float:
    """Return the floor of what a setting changes: of a window there is none, whatever the config has besides."""
    if "kv_keep" in setting.overrides:
        return keep_floor_of(setting.apply(config))
    if "kv_cache_dtype" in setting.overrides:
        return floor_of(setting.apply(config))
    return format_floor_of(setting.apply(config)) if "quantization" in setting.overrides else 0.0


def _has_floor(config: EngineConfig) -> bool:
    """Whether there is anything of a codec to measure, whatever floor was asked for."""
    return floor_of(replace(config, kv_quality_floor=None)) > 0


def _texts(file: Path | None, progress: Progress, *, leaves_reserved: bool) -> list[Text]:
    """Return what is read; of the default texts perhaps without what scorers are fitted to."""
    from pagefold.quality.reserved import for_evaluating  # noqa: PLC0415
    from pagefold.quality.texts import fetch_default_texts, read_text  # noqa: PLC0415

    if file is not None:
        return [read_text(file)]
    texts = fetch_default_texts(cache_dir(), progress=progress)
    return for_evaluating(texts) if leaves_reserved else texts


def _save(evaluation: Evaluation, config: EngineConfig, settings: Mapping[str, Setting]) -> None:
    for found in evaluation.settings:
        setting = settings[found.name]
        applied = setting.apply(config)
        if _floor(setting, replace(config, kv_quality_floor=None)):
            verdict = Verdict(
                model=evaluation.model,
                fingerprint=evaluation.fingerprint,
                subject=subject_of(applied, found.dtype, found.transport, found.mask),
                top1_agreement=found.top1_agreement.value,
                top1_standard_error=found.top1_agreement.standard_error,
                perplexity_change=found.perplexity_change.value,
                kl=found.kl.value,
                num_tokens=found.num_tokens,
                context_len=evaluation.context_len,
                text=evaluation.text,
                text_digest=evaluation.text_digest,
                date=evaluation.date,
                version=evaluation.version,
            )
            write_verdict(verdict, cache_dir())


def _recommended(
    evaluation: Evaluation, max_perplexity_change: float, settings: Mapping[str, Setting], floors: Mapping[str, float]
) -> tuple[str, str]:
    """Return the codec to use, and why. Number formats are none, and so are shares of older tokens."""
    from pagefold.quality.recommend import recommend  # noqa: PLC0415

    is_codec = {name: one.overrides.keys() <= {*_CODEC_FIELDS} for name, one in settings.items()}
    floors = {name: floors[name] if is_codec[name] else inf for name in settings}
    found = recommend(evaluation, max_perplexity_change, lambda setting: floors[setting.name])
    bound = f"perplexity within {max_perplexity_change:.2%} of the exact cache's, and top-1 agreement over its floor"
    if found is None:
        return "auto", f"no codec that was evaluated has {bound}"
    share = found.bytes_per_token / evaluation.exact_bytes_per_token
    return found.name, f"the smallest with {bound}: {share:.0%} of the bytes"


def _print(evaluation: Evaluation, floors: Mapping[str, float], told: tuple[str, str] | None, *, as_json: bool) -> None:
    if as_json:
        answer = evaluation.as_dict()
        if told is not None:
            answer["recommended"] = {"kv_cache_dtype": told[0], "why": told[1]}
        typer.echo(json.dumps(answer, indent=2))
        return
    from pagefold.cli.eval_tables import eval_tables  # noqa: PLC0415

    console = Console()
    for piece in eval_tables(evaluation, floors):
        console.print(piece)
    if told is not None:
        typer.echo(f"recommended: --kv-cache-dtype {told[0]} ({told[1]})")
