"""What the commands about prefix files share: flags that say a layout, and prompts out of files."""

from __future__ import annotations

import json
from dataclasses import field, make_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import typer

from pagefold.cli.options import read_flags
from pagefold.config import EngineConfig
from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.hub.progress import Progress
    from pagefold.server.warm_schemas import WarmRequest
    from pagefold.store.prefix_file import PrefixAbout
    from pagefold.store.prefix_layout import PrefixLayout

__all__ = [
    "LayoutFlags",
    "ModelWanted",
    "PrefixTarget",
    "PromptWanted",
    "export_prompt",
    "import_file",
    "lines_of",
    "read_prompt",
    "refuse_given",
    "told_of",
]

_SAYING_A_LAYOUT = (
    "device",
    "dtype",
    "block_size",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "max_model_len",
    "attention_backend",
    "model_impl",
    "quantization",
)
_MOST_TOKEN_ID = 2**31
_HINTS = get_type_hints(EngineConfig, include_extras=True)

LayoutFlags = make_dataclass(
    "LayoutFlags",
    [(name, _HINTS[name], field(default=EngineConfig.__dataclass_fields__[name].default)) for name in _SAYING_A_LAYOUT],
    frozen=True,
)
"""Those settings of an engine that decide how its blocks are made: flags of ``pagefold serve``, to be given alike."""


class ModelWanted(NamedTuple):
    """A model as a server has it.

    Attributes:
        model: its name; None if nobody gave one.
        flags: what was given for :class:`LayoutFlags`.
    """

    model: str | None
    flags: dict[str, Any]


class PromptWanted(NamedTuple):
    """A prompt that is to be exported.

    Attributes:
        file: where it is.
        model: whose blocks.
        tenant, cache_salt: whose prompt; None for what the file says.
        partial: whether its first blocks will do.
    """

    file: Path
    model: ModelWanted
    tenant: str | None
    cache_salt: str | None
    partial: bool


class PrefixTarget(NamedTuple):
    """Where a prefix is to be used.

    Attributes:
        model: by which; None for whoever can.
        tenant, cache_salt: by whom; None for those whose it is.
    """

    model: ModelWanted | None
    tenant: str | None
    cache_salt: str | None


def export_prompt(folder: Path, file: Path, wanted: PromptWanted, progress: Progress) -> PrefixAbout:
    """Write the blocks that a cache folder has of a prompt to ``file``; return what it says.

    Raises:
        PagefoldError: they are not there, or the prompt or the model is none; see who is asked.
    """
    from pagefold.store.prefix_folder import WantedPrefix, export_prefix  # noqa: PLC0415 - heavy

    layout, model_folder = _find_layout(wanted.model, progress)
    prompt = read_prompt(wanted.file, model_folder, wanted.tenant, wanted.cache_salt)
    asked = WantedPrefix(layout, layout.root(prompt.tenant, prompt.cache_salt), prompt.token_ids)
    return export_prefix(folder, file, asked, partial(progress, "exporting"), partial=wanted.partial)


def import_file(
    file: Path, folder: Path, limit_bytes: int | None, target: PrefixTarget, progress: Progress
) -> tuple[int, dict[str, Any]]:
    """Put a prefix file into a cache folder; return how many blocks are there then, and what was put, for JSON.

    Raises:
        PagefoldError: the file is not right, or no use there; see who is asked. Nothing was written.
    """
    from pagefold.store.export import import_limit  # noqa: PLC0415 - heavy
    from pagefold.store.prefix_blocks import PrefixBlocks  # noqa: PLC0415
    from pagefold.store.prefix_conversion import conversion_of  # noqa: PLC0415
    from pagefold.store.prefix_file import open_prefix  # noqa: PLC0415
    from pagefold.store.prefix_folder import import_prefix  # noqa: PLC0415

    limit_bytes = import_limit(folder, limit_bytes)
    with open_prefix(file) as prefix:
        layout = prefix.layout if target.model is None else _find_layout(target.model, progress)[0]
        conversion_of(prefix.layout, layout, str(file))  # before all of a large file is read
        prefix.check(partial(progress, "reading"))
        blocks = PrefixBlocks(prefix, layout, target.tenant, target.cache_salt)
        num_kept = import_prefix(blocks, folder, limit_bytes, partial(progress, "importing"))
    return num_kept, {
        "num_blocks": len(blocks.names),
        "num_tokens": blocks.num_tokens,
        "num_tokens_of_file": prefix.about.num_tokens,
        "layout": blocks.layout.told(),
    }


def refuse_given(why: str, flags: dict[str, str | None], *, is_there: bool = False) -> None:
    """Refuse flags that mean nothing here.

    Args:
        why: what they go with.
        flags: texts, by their flags.
        is_there: whether --partial is.

    Raises:
        ConfigError: one is given.
    """
    given = [name for name, value in flags.items() if value is not None] + ["--partial"] * is_there
    if given:
        msg = f"{given[0]} can only {why}."
        raise ConfigError(msg, remedy="Leave it out.")


def told_of(about: PrefixAbout) -> dict[str, Any]:
    """Return what a prefix file says of itself, for JSON."""
    return {
        "num_blocks": about.num_blocks,
        "num_tokens": about.num_tokens,
        "num_prompt_tokens": about.num_prompt_tokens,
        "layout": {**about.layout.told(), "digest": about.layout.digest.hex()},
        "namespace": about.namespace.hex(),
        "is_anybodys": about.is_anybodys,
        "path": about.path.hex(),
        "frames": about.frames.hex(),
    }


def lines_of(about: PrefixAbout) -> dict[str, str]:
    """Return what a prefix file says of itself, for people."""
    layout = about.layout
    whose = "anybody's" if about.is_anybodys else "of a tenant or a salt"
    return {
        "model": f"{layout.label}: {layout.model}",
        "dtype": layout.dtype,
        "arrangement": layout.arrangement,
        "decoder": layout.decoder,
        "blocks": f"{about.num_blocks:,} of {layout.block_size} tokens and {layout.block_bytes:,} bytes",
        "tokens": f"{about.num_tokens:,} of the prompt's {about.num_prompt_tokens:,}",
        "namespace": f"{about.namespace.hex()}, {whose}",
        "path": about.path.hex(),
        "digest": about.frames.hex(),
    }


def _find_layout(wanted: ModelWanted, progress: Progress) -> tuple[PrefixLayout, Path]:
    """Return how a model's blocks would be made, and the folder of the model; see :class:`LayoutFlags`.

    Raises:
        ConfigError, ModelNotFoundError, UnsupportedModelError: there is no such model, or it cannot be so.
    """
    from pagefold.cli.serve import check_installed, quiet_transformers  # noqa: PLC0415 - only here
    from pagefold.engine.prefix_layout import find_prefix_layout  # noqa: PLC0415 - torch comes with it

    if wanted.model is None:
        msg = "A prompt's blocks hang on the model, and none is given."
        raise ConfigError(msg, remedy="Give --model, and the server's flags that are among those of this command.")
    check_installed()
    read = read_flags(LayoutFlags, wanted.flags)
    if read["max_model_len"] is None:
        read["max_model_len"] = "auto"  # whatever this machine's memory holds now, blocks are made alike
    quiet_transformers(is_loaded=False)
    config = EngineConfig(model=wanted.model, kv_disk_path=".", **read)  # what leaves a process is named by content
    return find_prefix_layout(config, progress, lambda line: typer.echo(line, err=True))


class Prompt(NamedTuple):
    """A prompt, and whose it is.

    Attributes:
        token_ids: those that stay the same whatever follows.
        tenant, cache_salt: who finds its blocks.
    """

    token_ids: list[int]
    tenant: str
    cache_salt: str


def read_prompt(file: Path, model_folder: Path, tenant: str | None, cache_salt: str | None) -> Prompt:
    """Return the prompt in a file, as a server would cache it: a text, or an object as ``pagefold warm`` takes it.

    A text is taken as it is, but for one newline at its end, which editors put there.

    Args:
        file: the file.
        model_folder: the model's, with its tokenizer.
        tenant: whose it is; None for what the file says.
        cache_salt: the same.

    Raises:
        ConfigError: the file cannot be read, or is no prompt.
        InvalidRequestError: the model's template refuses it.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        msg = f"{file} cannot be read: {reason}."
        raise ConfigError(msg, remedy="Give a prompt as a text, or as JSON with prompt or messages.") from None
    asked = _asked(text, file)
    if asked.kv_keep is not None or asked.kv_quality is not None:
        msg = f"{file} asks for kv_keep or kv_quality, and a prefix of packed chunks cannot be a file."
        raise ConfigError(msg, remedy="Leave it out.")
    token_ids = _stable_tokens(asked, model_folder)
    if not token_ids:
        msg = f"Whatever follows may change all tokens of {file}."
        raise ConfigError(msg, remedy="Add some words, or give token ids.")
    of_file = (asked.tenant or "", asked.cache_salt or "")
    return Prompt(token_ids, of_file[0] if tenant is None else tenant, of_file[1] if cache_salt is None else cache_salt)


def _asked(text: str, file: Path) -> WarmRequest:
    from pagefold.cli.warm_file import warm_request_of  # noqa: PLC0415 - only here

    fields: Any = None
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            fields = None  # a text that begins so
    if not isinstance(fields, dict) or not fields.keys() & {"prompt", "messages"}:
        fields = {"prompt": text.removesuffix("\n")}
    return warm_request_of(fields, str(file))


def _stable_tokens(asked: WarmRequest, model_folder: Path) -> list[int]:
    from pagefold.tokenizer import Tokenizer  # noqa: PLC0415 - heavy

    if isinstance(asked.prompt, list):
        wrong = next((token_id for token_id in asked.prompt if not 0 <= token_id < _MOST_TOKEN_ID), None)
        if wrong is not None:
            msg = f"The prompt has token id {wrong:,}, which no model has."
            raise ConfigError(msg, remedy="Give ids of the model's vocabulary.")
        return asked.prompt
    if not (model_folder / "tokenizer_config.json").is_file():
        msg = f"{model_folder} has no tokenizer."
        raise ConfigError(msg, remedy='Give token ids: {"prompt": [1, 2, 3]}.')
    tokenizer = Tokenizer(model_folder)
    if asked.messages is None:
        return list(tokenizer.encode_prefix(asked.prompt or "").token_ids)
    text = tokenizer.render_chat_prefix([message.for_template() for message in asked.messages])
    return list(tokenizer.encode_rendered_prefix(text).token_ids)
