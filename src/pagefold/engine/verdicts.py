"""Verdicts: what ``pagefold eval`` found a codec, a number format or a share to cost on a model, kept in the cache.

An engine that is started with one reads the verdict on its model before it loads weights, and refuses what is under the
floor. Without a verdict nobody knows what it costs, and the engine says so and how to find out.

A codec's verdict compares it with the exact cache beside the same weights, a number format's with the model's own
numbers beside the exact cache: an engine that has both needs both. That of a share of older tokens (``kv_keep``) is
about what is stored of them, so about the codec too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.config import DROPPED_BITS
from pagefold.errors import ConfigError, QualityError
from pagefold.files.json_object import read_json_object
from pagefold.files.private import make_private_folder
from pagefold.files.whole import write_whole
from pagefold.kv import CODECS, KV_CACHE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pagefold.config import EngineConfig, TransportCodec

__all__ = [
    "FORMAT",
    "QUALITY_FIELDS",
    "ROUNDED",
    "SAME_AS",
    "Verdict",
    "check_quality",
    "floor_of",
    "format_floor_of",
    "keep_floor_of",
    "read_verdict",
    "subject_of",
    "verdicts_folder",
    "write_verdict",
]

FORMAT = 4
"""The version of the files that are written here, and of codecs and number formats: what one cost is no verdict on what
it has become. Files of another version are as if they were not there."""

QUALITY_FIELDS = ("dtype", "quantization", "block_size", "kv_cache_dtype", "kv_cache_dtype_skip_layers")
"""Fields of the engine's config that a verdict is about: another value of any of them needs another one."""

ROUNDED = ("int8_per_token_head", "k8v4")
"""Codecs with codes of 8 bit, which a lossy transport rounds."""

SAME_AS = {"fp8": "fp8_e4m3"}
"""Codecs of two names."""

_FLOOR_8_BIT, _FLOOR_LESS = 0.97, 0.95

_OF_DTYPE = ("device", "model_impl", "attention_backend")
"""Fields that decide, beside its own, what ``dtype=auto`` is."""

_OF_CODECS = ("kv_cache_dtype", "kv_cache_dtype_skip_layers")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a setting costs on a model. Figures are those of ``quality/result.py``.

    Attributes:
        model: what the user called it; for people.
        fingerprint: of its weights and config: what it is the verdict on.
        subject: the fields of ``QUALITY_FIELDS``; ``kv_transport_codec`` where that is lossy; and of ``kv_keep``, where
            a share is kept, the scorer and the share.
        top1_agreement: share of positions where the likeliest token is that of the exact cache.
        top1_standard_error: of it; None where there was one context only.
        perplexity_change: relative.
        kl: mean divergence, in nats.
        num_tokens: positions compared.
        context_len: tokens of each context.
        text: names of the texts.
        text_digest: digest of those texts.
        date: ISO 8601, UTC.
        version: of Pagefold.
    """

    model: str
    fingerprint: str
    subject: Mapping[str, Any]
    top1_agreement: float
    top1_standard_error: float | None
    perplexity_change: float
    kl: float
    num_tokens: int
    context_len: int
    text: str
    text_digest: str
    date: str
    version: str

    def told(self) -> str:
        """Return it as a sentence for people, without its full stop."""
        return (
            f"the likeliest token is the exact cache's at {self.top1_agreement:.2%} of {self.num_tokens:,} positions, "
            f"perplexity changes by {self.perplexity_change:+.2%}, KL divergence is {self.kl:.2g} "
            f"({self.date[:10]}, {self.text}, contexts of {self.context_len:,} tokens)"
        )


def subject_of(
    config: EngineConfig, dtype: str, transport: TransportCodec | None = None, mask: str = ""
) -> dict[str, Any]:
    """Return what of a config a verdict is about, as JSON has it: however a codec is spelled, it is the same one.

    Args:
        config: of an engine.
        dtype: what that computes in, which ``auto`` does not say.
        transport: how blocks are packed on their way to a pool; None for what the config says.
        mask: names by what older tokens are kept, where a share is.
    """
    found = {name: getattr(config, name) for name in QUALITY_FIELDS}
    name = KV_CACHE_DTYPES.get(config.kv_cache_dtype, config.kv_cache_dtype)
    found["kv_cache_dtype"] = SAME_AS.get(name, name)
    found["dtype"] = dtype
    found["kv_cache_dtype_skip_layers"] = sorted(set(config.kv_cache_dtype_skip_layers))
    if _is_rounded(config, transport or config.kv_transport_codec):
        found["kv_transport_codec"] = transport or config.kv_transport_codec
    if mask:
        found["kv_keep"] = mask
    return found


def _is_rounded(config: EngineConfig, transport: TransportCodec) -> bool:
    """Whether blocks come back from a pool as others than they were."""
    return bool(DROPPED_BITS[transport]) and KV_CACHE_DTYPES.get(config.kv_cache_dtype) in ROUNDED


def verdicts_folder(cache_dir: Path) -> Path:
    """Return the folder of all verdicts."""
    return cache_dir / "verdicts"


def write_verdict(verdict: Verdict, cache_dir: Path) -> Path:
    """Keep a verdict, for this user alone, in place of an older one on the same model and setting; return its file.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    file = _file(verdict.fingerprint, verdict.subject, cache_dir)
    try:
        make_private_folder(file.parent)
    except OSError as error:
        msg = f"Cannot write {file.parent}: {error.strerror or error}."
        raise ConfigError(msg, remedy="Name another cache folder in PAGEFOLD_CACHE.") from None
    write_whole(file, json.dumps({"format": FORMAT, **asdict(verdict)}, indent=2) + "\n", is_private=True)
    return file


def read_verdict(fingerprint: str, subject: Mapping[str, Any], cache_dir: Path) -> Verdict | None:
    """Return the verdict on a model and setting; None where there is none, or one that cannot be read."""
    found = read_json_object(_file(fingerprint, subject, cache_dir))
    if found.pop("format", None) != FORMAT:
        return None
    try:
        verdict = Verdict(**found)
        is_whole = isinstance(verdict.told(), str) and 0 <= verdict.top1_agreement <= 1
    except (TypeError, ValueError, ArithmeticError, LookupError):
        return None
    is_ours = (verdict.fingerprint, verdict.subject) == (fingerprint, subject)
    return verdict if is_whole and is_ours else None


def floor_of(config: EngineConfig) -> float:
    """Return the least top-1 agreement of a codec that is served unforced: as asked, or 97 % for 8 bit, 95 % for less.

    0 where there is nothing to measure: K and V are stored in 16 bit or more.
    """
    codec = CODECS.get(KV_CACHE_DTYPES.get(config.kv_cache_dtype, ""))
    element_bits = 16 if codec is None else min(codec.element_bits, (codec.values or codec).element_bits)
    if element_bits >= 16:  # noqa: PLR2004 - 16 bit
        return 0.0
    if config.kv_quality_floor is not None:
        return config.kv_quality_floor
    return _FLOOR_8_BIT if element_bits >= 8 else _FLOOR_LESS  # noqa: PLR2004 - 8 bit


def format_floor_of(config: EngineConfig) -> float:
    """Return the least top-1 agreement of a number format that is served unforced; 0 where products are not rounded."""
    floors = {"w8a8_int8": _FLOOR_8_BIT, "int4": _FLOOR_LESS}
    if config.quantization not in floors:
        return 0.0
    return floors[config.quantization] if config.kv_quality_floor is None else config.kv_quality_floor


def keep_floor_of(config: EngineConfig) -> float:
    """Return the least top-1 agreement where a share of older tokens is kept; 0 where all are."""
    if not config.masks:
        return 0.0
    return _FLOOR_LESS if config.kv_quality_floor is None else config.kv_quality_floor


class _Costly(NamedTuple):
    """Something of a config that has a floor.

    Attributes:
        what: it is, for people.
        floor: of its top-1 agreement.
        config: with nothing else that costs and is measured by itself.
        command: that measures it.
        is_forced: whether it is served under the floor, too.
        remedy: against that.
        mask: names by what older tokens are kept, where it is that.
    """

    what: str
    floor: float
    config: EngineConfig
    command: str
    is_forced: bool
    remedy: str
    mask: str = ""


def check_quality(  # noqa: PLR0913 - what a verdict is about, where it is, and who is told
    config: EngineConfig,
    dtype: str,
    fingerprint: Callable[[], str],
    cache_dir: Path,
    say: Callable[[str], None],
    *,
    masks: Sequence[str] = (),
) -> None:
    """Refuse a codec, a number format or a share whose verdict is under its floor, unless it is forced.

    Args:
        config: of the engine.
        dtype: what it computes in.
        fingerprint: returns that of the model's weights and config; called only where there is a floor.
        cache_dir: where verdicts are.
        say: takes a warning: there is no verdict, or something is forced.
        masks: names by what older tokens are kept, of each share below 1 that is.

    Raises:
        QualityError: the verdict is under the floor.
    """
    for one in _costly(config, dtype, masks):
        verdict = read_verdict(fingerprint(), subject_of(one.config, dtype, mask=one.mask), cache_dir)
        if verdict is None:
            say(f"nobody has measured what {one.what} costs on this model; to find out: {one.command}")
            continue
        if verdict.top1_agreement >= one.floor:
            continue
        what = f"{one.what} is under the quality floor of {one.floor:.1%} on this model"
        if not one.is_forced:
            msg = f"{what}: {verdict.told()}."
            raise QualityError(msg, remedy=one.remedy)
        say(f"{what}, and is forced: {verdict.told()}")


def _costly(config: EngineConfig, dtype: str, masks: Sequence[str]) -> Iterator[_Costly]:
    """Yield what of a config that computes in ``dtype`` has a floor."""
    if format_floor_of(config):
        name = config.quantization if dtype == "float32" else f"{dtype}+{config.quantization}"
        yield _Costly(
            what=f"quantization {config.quantization}",
            floor=format_floor_of(config),
            config=replace(config, kv_cache_dtype="auto", kv_cache_dtype_skip_layers=()),
            command=_command(config, f"--number-formats {name}", without=("dtype", "quantization", *_OF_CODECS)),
            is_forced=config.force_quantization,
            remedy="Use --quantization int8, or leave it out, set another --kv-quality-floor, or force it with "
            "--force-quantization.",
        )
    if floor_of(config):
        codec = CODECS[KV_CACHE_DTYPES[config.kv_cache_dtype]]
        skip = "keep layers in 16 bit with --kv-cache-dtype-skip-layers, "
        if codec.channel_tokens or config.masks:  # in all layers, or not at all
            skip = ""
        lossy = f" --kv-transport-codec {config.kv_transport_codec}"
        if not _is_rounded(config, config.kv_transport_codec):
            lossy = ""
        yield _Costly(
            what=_what(config),
            floor=floor_of(config),
            config=replace(config, kv_keep=()),
            command=_command(config, f"--kv-cache-dtype {config.kv_cache_dtype}", without=("kv_cache_dtype",)) + lossy,
            is_forced=config.force_kv_cache_dtype,
            remedy=f"Use another codec (pagefold eval --recommend names one), {skip}set another --kv-quality-floor, or "
            "force it with --force-kv-cache-dtype.",
        )
    for share, mask in zip(config.masks, masks, strict=True) if keep_floor_of(config) else ():
        what, other = f"kv_keep {share}", ""
        if config.kv_cache_dtype != "auto":
            what, other = f"{what} with kv_cache_dtype {config.kv_cache_dtype}", "use another codec, "
        yield _Costly(
            what=what,
            floor=keep_floor_of(config),
            config=config,
            command=_command(config, f"--kv-keep {share}"),
            is_forced=False,
            remedy=f"Keep more, {other}or set another --kv-quality-floor: 0 for none.",
            mask=mask,
        )


def _what(config: EngineConfig) -> str:
    is_rounded = _is_rounded(config, config.kv_transport_codec)
    lossy = f" with kv_transport_codec {config.kv_transport_codec}" if is_rounded else ""
    return f"kv_cache_dtype {config.kv_cache_dtype}{lossy}"


def _command(config: EngineConfig, what: str, *, without: tuple[str, ...] = ()) -> str:
    """Return the command that finds the verdict on ``what`` of ``config``, beside all other fields that decide it."""
    told = [f"pagefold eval {config.model} {what}"]
    defaults = type(config)(model=config.model)
    for name in (*_OF_DTYPE, *QUALITY_FIELDS):
        value = getattr(config, name)
        if name not in without and value != getattr(defaults, name):
            told.append(
                f"--{name.replace('_', '-')} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
            )
    return " ".join(told)


def _file(fingerprint: str, subject: Mapping[str, Any], cache_dir: Path) -> Path:
    digest = hashlib.sha256(json.dumps([fingerprint, dict(subject)], sort_keys=True).encode()).hexdigest()
    return verdicts_folder(cache_dir) / f"{digest[:32]}.json"
