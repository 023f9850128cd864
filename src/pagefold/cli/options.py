"""Options: flags that are settings of a config, so that each is spelled once, beside its field.

``with_flags`` gives a command one option for each field of a config that has a ``Flag``; ``read_flags`` makes the
config's values of what was given.
"""

from __future__ import annotations

import inspect
import json
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from pagefold.cli.size import parse_size
from pagefold.errors import ConfigError, PagefoldError
from pagefold.speculation.params import SpeculativeParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pagefold.config import Flag

__all__ = [
    "MODEL_HELP",
    "listed",
    "parse_layers",
    "parse_num_tokens",
    "parse_shares",
    "parse_speculation",
    "read_flags",
    "with_flags",
]

MODEL_HELP = "A built-in name, a local folder, a GGUF file, or a hub id: org/name, or org/name:Q4_K_M of a GGUF in it."
"""What may be given where a model is asked for."""


def with_flags(**panels: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command the flags of configs, which it takes as ``**flags``.

    Args:
        panels: a config for each panel of the help.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:  # noqa: ANN401 - whatever the flags are
            command(**given)

        own = inspect.signature(command, eval_str=True)
        parameters = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters += [one for panel, config in panels.items() for one in _parameters(config, panel)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def read_flags(config: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of ``config`` that flags have given, by their fields.

    Raises:
        ConfigError, typer.BadParameter: a text is none of what the setting takes.
    """
    read = {}
    for field, annotation, flag in _flags(config):
        value, wanted = given[_name(field, flag)], get_args(annotation)[0]
        if get_origin(wanted) is tuple:
            value = _parse_tuple(value, get_args(wanted)[0], _default(config, field))
        elif _takes_tokens(wanted):
            value = parse_num_tokens(value)
        read[field] = value
    return read


def parse_layers(text: str | None) -> tuple[int, ...]:
    """Return the layers that a flag names, as ``0,29``; none if it was not given.

    Raises:
        typer.BadParameter: it is no list of layers.
    """
    try:
        return tuple(int(layer) for layer in text.split(",")) if text else ()
    except ValueError:
        msg = f"{text!r} is no list of layers."
        raise typer.BadParameter(msg, param_hint="--kv-cache-dtype-skip-layers") from None


def parse_shares(text: str | None) -> tuple[float, ...]:
    """Return the shares that a flag names, as ``1,0.5``; none if it was not given.

    Raises:
        typer.BadParameter: it is no list of numbers.
    """
    try:
        return tuple(float(share) for share in text.split(",")) if text is not None else ()
    except ValueError:
        msg = f"{text!r} is no list of shares."
        raise typer.BadParameter(msg, param_hint="--kv-keep") from None


def parse_num_tokens(text: str | None) -> int | Literal["auto"] | None:
    """Return the tokens that a flag says, or ``auto``; None if it was not given.

    Raises:
        typer.BadParameter: it is neither.
    """
    if text is None:
        return None
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        msg = f"{text!r} is neither a number of tokens nor auto."
        raise typer.BadParameter(msg, param_hint="--max-model-len") from None


def parse_speculation(text: str) -> SpeculativeParams:
    """Return what ``--speculative-config`` says.

    Raises:
        typer.BadParameter: it is no JSON object, or something in it is wrong.
    """
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    try:
        if not isinstance(given, dict):
            msg = f"""{text!r} is no JSON object: write it as '{{"method": "tree"}}'."""
            raise typer.BadParameter(msg)
        return SpeculativeParams.of(given).over(None)
    except PagefoldError as error:
        raise typer.BadParameter(str(error)) from None


def listed(values: Sequence[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a flag lists: a JSON list, as vLLM writes it, or one text each time that it was given.

    Raises:
        ConfigError: a list is of something else.
    """
    if not values:
        return default
    listed: list[str] = []
    for value in values:
        try:
            texts = json.loads(value) if value.lstrip().startswith("[") else [value]
        except ValueError:
            texts = None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            msg = f"{value!r} is neither a text nor a JSON list of texts."
            raise ConfigError(msg, remedy="""Write it as '["https://example.org"]'.""")
        listed += texts
    return tuple(listed)


def _parse_tuple(value: Any, of: type, default: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ANN401 - of three kinds
    """Return what a flag lists, of numbers of layers, of shares, or of texts."""
    if of is int:
        return parse_layers(value)
    return parse_shares(value) if of is float else listed(value, default)


def _flags(config: type) -> Iterator[tuple[str, Any, Flag]]:
    """Yield the fields of ``config`` that are flags, each with its annotation."""
    for field, annotation in get_type_hints(config, include_extras=True).items():
        if get_origin(annotation) is Annotated:
            yield field, annotation, annotation.__metadata__[0]


def _parameters(config: type, panel: str) -> Iterator[inspect.Parameter]:
    for field, annotation, flag in _flags(config):
        wanted, name, default = get_args(annotation)[0], _name(field, flag), _default(config, field)
        how: dict[str, Any] = {"help": flag.help, "rich_help_panel": panel}
        if flag.metavar is not None:
            how["metavar"] = flag.metavar
        if flag.metavar == "SIZE":
            how["parser"] = parse_size
        if flag.metavar == "JSON":
            how["parser"] = parse_speculation
        names = [f"--{name.replace('_', '-')}"] if default is False else []  # there is no need to say that it is not
        kind = inspect.Parameter.KEYWORD_ONLY
        option = Annotated[_type(wanted), typer.Option(*names, **how)]  # type: ignore[valid-type]  # it is made here
        yield inspect.Parameter(name, kind, default=None if default in ((), ("*",)) else default, annotation=option)


def _name(field: str, flag: Flag) -> str:
    return flag.name or field.removesuffix("_s")


def _default(config: type, field: str) -> Any:  # noqa: ANN401 - whatever the setting is
    return config.__dataclass_fields__[field].default  # type: ignore[attr-defined]


def _type(wanted: Any) -> Any:  # noqa: ANN401 - annotations have no type
    """Return what typer makes of a flag's text: names are texts here, which the config checks."""
    if get_origin(wanted) is tuple:
        return list[str] | None if str in get_args(wanted) else str | None
    if _takes_tokens(wanted):
        return str | None
    if get_origin(wanted) is Literal:
        return str
    literals = [one for one in get_args(wanted) if get_origin(one) is Literal]
    return Union[str, None] if literals else wanted  # noqa: UP007 - made, not written


def _takes_tokens(wanted: Any) -> bool:  # noqa: ANN401 - as above
    return int in get_args(wanted) and any(get_origin(one) is Literal for one in get_args(wanted))
