"""SamplingParams: how the next token is chosen, and when to stop, in vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagefold.beams.search import EarlyStopping  # noqa: TC001 - wrong_type reads it
from pagefold.errors import InvalidRequestError
from pagefold.structured.params import StructuredOutputsParams  # noqa: TC001 - wrong_type reads it
from pagefold.typecheck import wrong_type

__all__ = ["MAX_BAD_WORDS", "MAX_LOGPROBS", "MAX_SAMPLES", "SamplingParams", "out_of_range"]

_MAX_TEMPERATURE = 2.0
_GREEDY_BELOW = 1e-5
_MAX_STOP_STRINGS = 16
_MAX_PENALTY = 2.0
_MAX_BIAS = 100.0
_MAX_BAD_WORD_CHARACTERS = 256

MAX_BAD_WORDS = 1024
"""How many texts an output can be forbidden to hold."""

MAX_LOGPROBS = 20
"""How many alternatives a token's logprobs may tell, as in vLLM and in OpenAI's chats."""

_MAX_LENGTH_PENALTY = 10.0
_WITHOUT_BEAMS: dict[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None,),
    "stop": ((),),
    "allowed_token_ids": (None,),
    "bad_words": ((),),
    "structured_outputs": (None,),
}
"""What goes with beams of each field that would change what is searched."""

MAX_SAMPLES = 128
"""How many outputs one prompt may have, as in OpenAI's chats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. Names, defaults and meaning are vLLM's.

    Attributes:
        n: how many outputs the prompt gets, 1 to 128. Each is sampled on its own; the prompt is computed once. A greedy
            request has one, as in vLLM: more would be the same, unless beams are searched.
        best_of: so many are sampled, at least ``n``, and the ``n`` with the highest logprob per token are returned, the
            best first. OpenAI's measure: the sum, which vLLM took, prefers short outputs. None samples ``n``.
        temperature: 0 is greedy; at most 2.
        top_p: keep the most likely tokens whose probabilities add up to this much, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep the tokens that are at least this share as likely as the most likely one, in [0, 1].
        presence_penalty: taken from the logit of every token that the output holds; in [-2, 2].
        frequency_penalty: taken from a token's logit for each time that the output holds it; in [-2, 2].
        repetition_penalty: the logit of every token that prompt or output holds is divided by this if it is positive,
            else multiplied; above 0.
        logit_bias: added to the logits of these token ids; in [-100, 100].
        max_tokens: how many tokens to generate at most; None for as many as ``max_model_len`` leaves. With 0 the prompt
            is computed and nothing is sampled.
        min_tokens: how many tokens come before any that ends the output, and before a stop string may.
        stop: texts that end the output; they are not part of it. One text, several, or None.
        include_stop_str_in_output: keep the stop string that ended the output, or the text of the stop token.
        stop_token_ids: token ids that end the output; or None.
        ignore_eos: go on after the model's end-of-sequence token.
        seed: of this request's random draws. A request with a seed draws the same tokens in every batch, but where two
            are equal within rounding. Sample ``i`` draws what a request with ``seed + i`` would draw, as in vLLM.
        logprobs: return each output token's logprob, and those of so many most likely tokens, 0 to 20. They are of
            the model's own distribution: without bias, penalties, temperature and cuts. None returns none.
        prompt_logprobs: the same of the prompt's tokens, which are all computed then: what the prefix cache holds of
            them is not used.
        allowed_token_ids: only these may be sampled; None for all.
        bad_words: texts that the output must not hold, with or without a space before them. What is banned is the last
            token of each text's tokens, where the output ends with those before; so a text that is written in other
            tokens than the tokenizer's can still come, as in vLLM.
        truncate_prompt_tokens: keep only so many tokens of the prompt, its last ones; -1 keeps what ``max_model_len``
            leaves beside ``max_tokens``. None keeps all.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: what the output must look like; None for free text.
        shown_special_tokens: special tokens whose text is part of the output's all the same, such as marks of thinking.
        use_beam_search: search for the likeliest outputs instead of sampling, with as many beams as there would be
            samples (``best_of``, or ``n``), as transformers does. The best come first. ``temperature`` must be 0.
        length_penalty: of beams: what an output is ranked by is its logprob over its length to the power of this.
        early_stopping: of beams: True ends when as many outputs as beams are finished; False when no better one is
            likely; ``never`` when none is possible.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    shown_special_tokens: tuple[str, ...] = ()
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is None or isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(value or ()))
        if isinstance(self.allowed_token_ids, Sequence):
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias) or None)
        wrong = wrong_type(self)
        if wrong is not None:
            raise out_of_range(wrong.field, repr(wrong.value), wrong.allowed)
        self._check_distribution()
        self._check_samples()
        self._check_length()
        self._check_restrictions()
        self._check_beams()
        for param in ("logprobs", "prompt_logprobs"):
            number = getattr(self, param)
            if number is not None and not 0 <= number <= MAX_LOGPROBS:
                raise out_of_range(param, number, f"between 0 and {MAX_LOGPROBS}, or None for none")

    def _check_distribution(self) -> None:
        if not 0.0 <= self.temperature <= _MAX_TEMPERATURE:
            raise out_of_range("temperature", self.temperature, "between 0 (greedy) and 2")
        if not 0.0 < self.top_p <= 1.0:
            raise out_of_range("top_p", self.top_p, "above 0 and at most 1")
        if self.top_k < -1:
            raise out_of_range("top_k", self.top_k, "a positive number, or 0 or -1 to keep all tokens")
        if not 0.0 <= self.min_p <= 1.0:
            raise out_of_range("min_p", self.min_p, "between 0 and 1")
        for param in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, param)
            if not -_MAX_PENALTY <= penalty <= _MAX_PENALTY:
                raise out_of_range(param, penalty, "between -2 and 2")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise out_of_range("repetition_penalty", self.repetition_penalty, "above 0, and finite")
        for token_id, bias in (self.logit_bias or {}).items():
            if not -_MAX_BIAS <= bias <= _MAX_BIAS:
                raise out_of_range("logit_bias", f"{bias} for token {token_id}", "between -100 and 100")

    def _check_samples(self) -> None:
        if not 1 <= self.n <= MAX_SAMPLES:
            raise out_of_range("n", self.n, f"between 1 and {MAX_SAMPLES}")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_SAMPLES:
            raise out_of_range("best_of", self.best_of, f"at least n ({self.n}) and at most {MAX_SAMPLES}")
        if self.is_greedy and self.num_samples > 1 and not self.use_beam_search:
            param = "n" if self.n > 1 else "best_of"
            msg = f"{param} is {self.num_samples}, but with temperature {self.temperature:g} all outputs are the same."
            raise InvalidRequestError(msg, param=param, remedy="Leave it out, or give a higher temperature.")

    def _check_length(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise out_of_range("max_tokens", self.max_tokens, "at least 1, or 0 to compute the prompt only")
        if self.min_tokens < 0:
            raise out_of_range("min_tokens", self.min_tokens, "at least 0")
        if len(self.stop) > _MAX_STOP_STRINGS:
            raise out_of_range("stop", f"{len(self.stop)} strings", f"at most {_MAX_STOP_STRINGS} strings")
        if any(not text for text in self.stop):
            raise out_of_range("stop", "an empty string", "texts of at least one character")

        keeps = self.truncate_prompt_tokens
        if keeps is not None and keeps != -1 and keeps < 1:
            raise out_of_range("truncate_prompt_tokens", keeps, "at least 1, or -1 for as many as fit")

    def _check_restrictions(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise out_of_range("allowed_token_ids", "empty", "at least one token id, or None for all")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise out_of_range("bad_words", f"{len(self.bad_words)} texts", f"at most {MAX_BAD_WORDS} texts")
        for text in self.bad_words:
            if not text.strip() or len(text) > _MAX_BAD_WORD_CHARACTERS:
                about = f"{_MAX_BAD_WORD_CHARACTERS} characters at most, and not only spaces"
                raise out_of_range("bad_words", f"a text of {len(text)} characters", f"texts of {about}")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise out_of_range("bad_words", "half of a surrogate pair", "whole characters") from None

    def _check_beams(self) -> None:
        if self.early_stopping not in {True, False, "never"}:
            raise out_of_range("early_stopping", repr(self.early_stopping), "true, false or never")
        if not self.use_beam_search:
            for param, given, default in (
                ("length_penalty", self.length_penalty, 1.0),
                ("early_stopping", self.early_stopping, False),
            ):
                if given != default:
                    msg = f"{param} is {given}, but use_beam_search is not true."
                    raise InvalidRequestError(msg, param=param, remedy="It is of beams: leave it out, or ask for them.")
            return
        if not -_MAX_LENGTH_PENALTY <= self.length_penalty <= _MAX_LENGTH_PENALTY:
            raise out_of_range("length_penalty", self.length_penalty, "between -10 and 10")
        if self.max_tokens == 0:
            raise out_of_range("max_tokens", 0, "at least 1 where beams are searched")
        about = "and beams are not sampled: the likeliest outputs are searched for."
        if not self.is_greedy:
            msg = f"temperature is {self.temperature:g}, {about}"
            raise InvalidRequestError(msg, param="temperature", remedy="Send temperature 0.")
        for param, allowed in _WITHOUT_BEAMS.items():
            if getattr(self, param) not in allowed:
                msg = f"{param} is {getattr(self, param)!r}, {about}"
                raise InvalidRequestError(msg, param=param, remedy="Leave it out, or leave use_beam_search out.")

    def truncated(self, prompt_token_ids: list[int], max_model_len: int) -> list[int]:
        """Return what ``truncate_prompt_tokens`` leaves of a prompt, where so many tokens are the context."""
        keeps = self.truncate_prompt_tokens
        if keeps is None:
            return prompt_token_ids
        if keeps == -1:
            keeps = max(1, max_model_len - max(1, self.max_tokens or 1))
        return prompt_token_ids[-keeps:]

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken: so near to 0 (vLLM's bound) scaled logits would overflow."""
        return self.temperature < _GREEDY_BELOW

    @property
    def num_samples(self) -> int:
        """How many outputs are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks_samples(self) -> bool:
        """Whether more outputs are generated than returned: which, their logprobs say, or the order of beams."""
        return self.num_samples > self.n

    @property
    def has_penalties(self) -> bool:
        """Whether the next token depends on which tokens came before, besides through the model."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def restricts_tokens(self) -> bool:
        """Whether some tokens must not come, whatever the model finds likely."""
        return self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked but to draw from the model's distribution, tempered and cut."""
        return (
            not self.use_beam_search
            and not (self.has_penalties or self.logit_bias or self.min_tokens or self.ranks_samples)
            and not self.restricts_tokens
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.structured_outputs is None
        )


def out_of_range(param: str, value: object, allowed: str) -> InvalidRequestError:
    """Return what a user is told of a value that ``param`` must not have."""
    return InvalidRequestError(f"{param} is {value}.", param=param, remedy=f"It must be {allowed}.")
