"""Chat templates, rendered as transformers renders them. A template is a stranger's program: it runs in a sandbox."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["is_plain_template", "render_template"]

_NOT_PLAIN = {"namespace", "dict", "strftime_now"}
"""What transformers makes safe, or adds, in ways of its own: templates that name them are its to render."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning goes by. Templates read the first, some the second."""


def is_plain_template(template: str) -> bool:
    """Whether :func:`render_template` makes of a template what transformers makes of it."""
    from jinja2 import TemplateSyntaxError, nodes  # noqa: PLC0415 - models without a template do without

    try:
        parsed = _environment().parse(template)
    except TemplateSyntaxError:  # one that is wrong, or has transformers' own tags
        return False
    return not any(name.name in _NOT_PLAIN for name in parsed.find_all(nodes.Name))


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
) -> str:
    """Return the text of a chat.

    Args:
        template: a plain one.
        messages: of JSON's types alone.
        tools: of JSON's types alone; None without tools.
        variables: what the template may read besides, special tokens (as ``bos_token``) among them.
        add_generation_prompt: whether the text ends with the beginning of the assistant's answer.

    Raises:
        ValueError: there are no messages. And whatever a template raises.
    """
    if not messages:
        msg = "Cannot apply chat template to an empty conversation. Provide at least one message."
        raise ValueError(msg)
    present = [{name: value for name, value in message.items() if value is not None} for message in messages]
    return _compiled(template).render(
        messages=[_with_reasoning(message) for message in present],
        tools=tools,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


@lru_cache(maxsize=8)  # a model's own are a few
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - as above

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _to_json(
    value: Any,  # noqa: ANN401 - of JSON
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may give it by place
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Jinja's own makes HTML's entities of ``<`` and the like."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError  # noqa: PLC0415 - as above

    raise TemplateError(message)
