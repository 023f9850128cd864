"""SpeculativeParams: who drafts for a server or a request, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

from pagefold.errors import ConfigError, InvalidRequestError
from pagefold.typecheck import wrong_type

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_DRAFTS", "METHODS", "OF_THE_START", "SpeculativeParams"]

_BY_MODEL = "draft_model"
METHODS = ("tree", "ngram", _BY_MODEL)

OF_THE_START = ("model", "quantization", "kv_cache_memory_bytes")
"""Fields that a start decides, for all requests."""

MAX_DRAFTS = 32
"""How many tokens a request's row may have beside its own."""

_MOST_IN_A_STEP = 128
_QUANTIZATIONS = "none", "int4", "int8", "w8a8_int8", None
_MAX_LOOKUP = 32
_MAX_SIZES = 8
"""How many lengths may be looked for: each is noted of every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeParams:
    """Who drafts, and how much. Names are those of vLLM's ``speculative_config``.

    Attributes:
        method: ``tree`` (what followed before, in the request's text and in what its tenant has cached), ``ngram`` (in
            the request's text alone), ``draft_model`` (a smaller model).
        num_speculative_tokens: how many drafts a step may have for one request; 0 for none. How many it has is decided
            anew in each step, by how often they were right and what they cost.
        prompt_lookup_min: with ``ngram``, how many tokens must agree at least.
        prompt_lookup_max: with ``ngram``, how many are looked for first.
        model: the draft model that a start loads: a name, a folder or a hub id, as for the model itself. It must have
            the same tokens. It is loaded whatever ``method`` is, and requests may ask for it. None for none.
        quantization: of the draft model's weights; None for as they are.
        kv_cache_memory_bytes: how much of the KV budget is the draft model's; None for as many tokens as the model has.
        given: the fields that a client or a command line has named, where these were read; empty where all count.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    method: str = "tree"
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    model: str | None = None
    quantization: Literal["none", "int4", "int8", "w8a8_int8"] | None = None
    kv_cache_memory_bytes: int | None = None
    given: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        wrong = wrong_type(self)
        if wrong is not None:
            raise _bad(wrong.field, repr(wrong.value), wrong.allowed)
        if self.method not in METHODS:
            raise _bad("method", repr(self.method), f"one of {', '.join(METHODS)}")
        if not 0 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise _bad("num_speculative_tokens", self.num_speculative_tokens, f"between 0 and {MAX_DRAFTS}")
        if not 1 <= self.prompt_lookup_min <= _MAX_LOOKUP:
            raise _bad("prompt_lookup_min", self.prompt_lookup_min, f"between 1 and {_MAX_LOOKUP}")
        if self.model is not None and not self.model:
            raise _bad("model", "empty", "left out where there is none")
        if self.quantization not in _QUANTIZATIONS:
            raise _bad("quantization", repr(self.quantization), "none, int4, int8, w8a8_int8, or left out")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise _bad("kv_cache_memory_bytes", self.kv_cache_memory_bytes, "a number of bytes, at least 1")
        if not self.given:  # else what is left out is not known yet
            self._check_together()

    def _check_together(self) -> None:
        if not self.prompt_lookup_min <= self.prompt_lookup_max <= _MAX_LOOKUP:
            least = self.prompt_lookup_min
            raise _bad("prompt_lookup_max", self.prompt_lookup_max, f"between {least} (the least) and {_MAX_LOOKUP}")
        if self.prompt_lookup_max - self.prompt_lookup_min >= _MAX_SIZES:
            most = self.prompt_lookup_min + _MAX_SIZES - 1
            raise _bad("prompt_lookup_max", self.prompt_lookup_max, f"at most {most}, {_MAX_SIZES} lengths in all")

    @classmethod
    def of(cls, given: Mapping[str, object]) -> SpeculativeParams:
        """Return what was given by field, as a client or a command line does. It is to be put over a default then.

        Raises:
            InvalidRequestError: there is no such field, or a value is out of range.
        """
        known = [one.name for one in fields(cls) if one.compare]
        if "model" in given and "method" not in given:  # as in vLLM
            given = {"method": _BY_MODEL, **given}
        for name in given:
            if name not in known:
                param = f"speculative_config.{name}"
                msg = f"There is no field {param}."
                raise InvalidRequestError(msg, param=param, remedy=f"There are {', '.join(known)}.")
        return cls(**given, given=tuple(given))  # type: ignore[arg-type]  # it checks their types

    def over(self, default: SpeculativeParams | None) -> SpeculativeParams:
        """Return the same with ``default``'s value of each field that was not given; the field's own without one.

        Raises:
            InvalidRequestError: they do not go together.
        """
        if not self.given:
            return self
        return replace(default or SpeculativeParams(), **{name: getattr(self, name) for name in self.given})

    def check_start(self) -> None:
        """See that a server can be started so.

        Raises:
            ConfigError: something of a draft model is given, and no model.
        """
        if self.model is not None:
            return
        if self.is_by_model:
            msg = f"speculative_config.method is {_BY_MODEL}, and no model is given."
            raise ConfigError(msg, remedy="Give speculative_config.model too.")
        for name in OF_THE_START:
            if getattr(self, name) is not None:
                msg = f"speculative_config.{name} is {getattr(self, name)!r}, and no model is to draft."
                raise ConfigError(msg, remedy="Give speculative_config.model too, or leave it out.")

    def most_in_a_step(self, max_num_batched_tokens: int) -> int:
        """Return how many drafts a step may have, for all requests together: each has logits of its own."""
        return 0 if self.is_off else min(_MOST_IN_A_STEP, max_num_batched_tokens - 1)

    @property
    def is_by_model(self) -> bool:
        """Whether a model drafts."""
        return self.method == _BY_MODEL

    @property
    def is_off(self) -> bool:
        """Whether nobody drafts."""
        return self.num_speculative_tokens == 0


def _bad(name: str, value: object, allowed: str) -> InvalidRequestError:
    field = f"speculative_config.{name}"
    return InvalidRequestError(f"{field} is {value}.", param=field, remedy=f"It must be {allowed}.")
