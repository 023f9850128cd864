"""What docs/ says of flags, routes, fields, metrics and errors, read from the code that has them."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import typer
from griffe import Docstring, DocstringSectionKind
from pydantic import BaseModel

from pagefold.cli import app as cli
from pagefold.config import ServerConfig
from pagefold.engine.status import EngineStatus
from pagefold.errors import PagefoldError
from pagefold.observe.ledger import Ledger
from pagefold.observe.metrics import Metrics
from pagefold.observe.misses import Cause
from pagefold.sampling import SamplingParams
from pagefold.server import create_app
from pagefold.server.errors import _FORMS
from pagefold.server.late_engine import LateEngine
from pagefold.server.unsupported import IN_CHAT, IN_COMPLETIONS, IN_MESSAGES, IN_RESPONSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from fastapi import FastAPI
    from prometheus_client.metrics_core import Metric

__all__ = ["TABLES"]

_Class = TypeVar("_Class")
_API_KEY, _ADMIN_KEY = "api", "admin"
_BIGGEST = 2**31 - 1  # bounds from here on only say that a number must fit into a machine's


# The command line.


def commands() -> str:
    """Every command with its arguments and flags."""
    sections = []
    for name, command in _commands("pagefold", typer.main.get_command(cli)):
        arguments = " ".join(_argument(param) for param in command.params if not param.opts[0].startswith("-"))
        flags = [param for param in command.params if param.opts[0].startswith("-")]
        usage = f"{name} {arguments}".strip() + (" [FLAGS]" if flags else "")
        section = [f"## {name}", f"    {usage}", _prose(command.help or "")]
        section += [_flags(panel, [flag for flag in flags if _panel(flag) == panel]) for panel in _panels(flags)]
        sections.append("\n\n".join(section))
    return "\n\n".join(sections)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - typer's commands, typed nowhere
    for sub_name, sub_command in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {sub_name}", sub_command)
    if not hasattr(command, "commands"):
        yield name, command


def _argument(param: Any) -> str:  # noqa: ANN401 - as above
    name = param.metavar or param.name.upper()
    return name if param.required else f"[{name}]"


def _panel(param: Any) -> str:  # noqa: ANN401 - as above
    return getattr(param, "rich_help_panel", None) or ""


def _panels(flags: list[Any]) -> list[str]:
    return list(dict.fromkeys(_panel(flag) for flag in flags))


def _flags(panel: str, flags: list[Any]) -> str:
    rows = [(_flag(flag), _default(flag), _cell(flag.help or "")) for flag in flags]
    return _table((panel or "flag", "default", "meaning"), rows)


def _flag(flag: Any) -> str:  # noqa: ANN401 - as above
    takes = "" if flag.is_flag else f" {flag.metavar or flag.name.rsplit('_', 1)[-1].upper()}"
    return ", ".join(f"`{name}{takes}`" for name in [*flag.opts, *flag.secondary_opts]).replace("|", "/")


def _default(flag: Any) -> str:  # noqa: ANN401 - as above
    if flag.is_flag:
        return "on" if flag.default else "off"
    return "" if flag.default is None else f"`{flag.default}`"


# HTTP.


def routes() -> str:
    """Every route, and which key it asks for on a server that has keys."""
    app = _app(ServerConfig(api_keys=(_API_KEY,), admin_api_key=_ADMIN_KEY))
    rows = [
        (f"`{method.upper()} {path}`", _prose(operation["description"]), asyncio.run(_key(app, method, path)))
        for path, method, operation in _operations(app)
    ]
    return _table(("route", "", "key"), rows)


async def _key(app: FastAPI, method: str, path: str) -> str:
    """Return which key opens a route, found by knocking."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://door") as client:
        for key in ("", _API_KEY, _ADMIN_KEY):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            response = await client.request(method, path, headers=headers)
            if response.status_code not in (401, 403):
                return key or "none"
    message = f"no key opens {path}"
    raise AssertionError(message)


def request_fields() -> str:
    """The fields of every route's body."""
    app = _app(ServerConfig())
    schemas = app.openapi()["components"]["schemas"]
    sections = []
    for path, method, operation in _operations(app):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        if "$ref" not in content:
            continue
        name = content["$ref"].rsplit("/", 1)[-1]
        said = _said_of_fields(name)
        rows = [
            (f"`{field}`", _type(schema), _field_default(field, schema, schemas[name]), _cell(said.get(field, "")))
            for field, schema in schemas[name]["properties"].items()
        ]
        rows.sort(key=lambda row: row[2] != "required")
        sections.append(f"### {method.upper()} {path}\n\n" + _table(("field", "type", "default", "meaning"), rows))
    return "\n\n".join(sections)


def _app(config: ServerConfig) -> FastAPI:
    return create_app(LateEngine(), model_name="model", config=config, metrics=Metrics("model"), ledger=Ledger())


def _operations(app: FastAPI) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _said_of_fields(name: str) -> dict[str, str]:
    """Return what the docstrings of a form and of what it stands on say of its fields, by the field's name in JSON."""
    form = next(known for known in _subclasses(BaseModel, within="pagefold.server") if known.__name__ == name)
    said = _attributes(SamplingParams)
    for part in reversed([base for base in form.__mro__ if issubclass(base, BaseModel)]):
        said |= _attributes(part)
    names = {field: known.alias or field for field, known in form.model_fields.items()}
    return {names.get(field, field): words for field, words in said.items()}


def _attributes(documented: type) -> dict[str, str]:
    sections = Docstring(inspect.getdoc(documented) or "").parse("google", warnings=False)
    listed = [section.value for section in sections if section.kind is DocstringSectionKind.attributes]
    return {attribute.name: attribute.description for attributes in listed for attribute in attributes}


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rsplit('/', 1)[-1]}`"
    if "anyOf" in schema or "oneOf" in schema:
        forms = schema.get("anyOf", []) + schema.get("oneOf", [])
        return " or ".join(dict.fromkeys(_type(one) for one in forms if one.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    words = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "object": "object"}
    bounds = [
        f"{word} {schema[bound]:g}"
        for bound, word in (("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"))
        if abs(schema.get(bound, _BIGGEST)) < _BIGGEST
    ]
    return " ".join([words.get(schema.get("type", ""), "any"), ", ".join(bounds)]).strip()


def _field_default(field: str, schema: Mapping[str, Any], form: Mapping[str, Any]) -> str:
    if field in form.get("required", []):
        return "required"
    default = schema.get("default")
    if default in (None, [], {}):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def unsupported() -> str:
    """The fields that are refused by name."""
    both = [field for field in IN_CHAT if field in IN_COMPLETIONS]
    rows = [
        ("`/v1/completions` and `/v1/chat/completions`", both),
        ("`/v1/completions`", [field for field in IN_COMPLETIONS if field not in both]),
        ("`/v1/chat/completions`", [field for field in IN_CHAT if field not in both]),
        ("`/v1/responses`", list(IN_RESPONSES)),
        ("`/v1/messages`", list(IN_MESSAGES)),
    ]
    return _table(("of", "refused"), [(of, ", ".join(f"`{field}`" for field in fields)) for of, fields in rows])


# Metrics.


def metrics_of_vllm() -> str:
    """Every metric that vLLM has too."""
    return _metrics("vllm:")


def metrics_of_pagefold() -> str:
    """Every metric that vLLM has not."""
    return _metrics("pagefold:")


def _metrics(prefix: str) -> str:
    metrics = Metrics("model")
    metrics.watch(EngineStatus)
    families = metrics.read()
    known = ("vllm:", "pagefold:", "process_")  # the last are Prometheus' own: the page has a word on them
    assert all(family.name.startswith(known) for family in families), "in neither table"
    rows = [
        (f"`{_series(family)}`", family.type, _labels(family), family.documentation)
        for family in families
        if family.name.startswith(prefix)
    ]
    return _table(("metric", "type", "labels", ""), rows)


def _series(family: Metric) -> str:
    """Return the name that a query has."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def _labels(family: Metric) -> str:
    """Return the labels beside those that every series has, and what they can be."""
    values: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label not in ("model_name", "engine", "le"):
                values.setdefault(label, {})[value] = None
    return "; ".join(f"`{label}`: {', '.join(known)}" for label, known in values.items())


# Errors.


def error_types() -> str:
    """Every type of error that a user can meet, with its form over HTTP."""
    rows = []
    for error in sorted(_subclasses(PagefoldError, within="pagefold"), key=lambda error: error.__name__):
        form = next((_FORMS[base] for base in error.__mro__ if base in _FORMS and base is not Exception), None)
        over_http = f"{form.status} `{form.code or form.type}`" if form else ""
        rows.append((f"`{error.__name__}`", over_http, _cell(inspect.getdoc(error) or "")))
    return _table(("error", "over HTTP", "when"), rows)


def _subclasses(parent: type[_Class], *, within: str) -> Iterator[type[_Class]]:
    """Yield all that stands on ``parent`` in a package, at any depth."""
    for child in parent.__subclasses__():
        if child.__module__.startswith(within):
            yield child
        yield from _subclasses(child, within=within)


# Markdown.


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("  ", " ") for cells in lines)


def _cell(words: str) -> str:
    """Return the first paragraph on one line, its code spans as Markdown has them."""
    return _prose(words.split("\n\n", maxsplit=1)[0]).replace("|", "\\|")


def _prose(words: str) -> str:
    paragraphs = [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(words).split("\n\n")]
    return "\n\n".join(paragraphs).replace("``", "`")


def causes_of_misses() -> str:
    """Return why tokens are computed, each cause with what would help."""
    rows = ((f"`{cause.value}`", f"{cause.told[0].upper()}{cause.told[1:]}.", cause.remedy) for cause in Cause)
    return _table(("cause", "", "what helps"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "causes of misses": causes_of_misses,
    "commands": commands,
    "errors": error_types,
    "metrics of pagefold": metrics_of_pagefold,
    "metrics of vllm": metrics_of_vllm,
    "request fields": request_fields,
    "routes": routes,
    "unsupported": unsupported,
}
"""What stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``."""
