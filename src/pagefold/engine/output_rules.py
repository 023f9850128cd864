"""Output rules: what a request says of its output's tokens and text, as matchers and texts of its samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.engine.outputs import OutputText
from pagefold.errors import InvalidRequestError
from pagefold.structured.params import FIELD
from pagefold.structured.restriction import Restriction, sequences_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.request import Request
    from pagefold.sampling import SamplingParams
    from pagefold.structured.grammar import Grammar
    from pagefold.structured.matcher import TokenMatcher
    from pagefold.tokenizer import Tokenizer

__all__ = ["matcher_error", "matchers", "output_text", "refuse_without_tokenizer"]

_NEED_TEXT = {
    "stop": ("Stop strings need", "Use stop_token_ids."),
    "bad_words": ("Bad words need", "Use logit_bias, or allowed_token_ids."),
}


def refuse_without_tokenizer(sampling: SamplingParams) -> None:
    """Refuse what an engine without a tokenizer cannot do.

    Raises:
        InvalidRequestError: with the field at fault.
    """
    for param, (need, remedy) in _NEED_TEXT.items():
        if getattr(sampling, param):
            msg = f"{need} a tokenizer, and this engine works in tokens only."
            raise InvalidRequestError(msg, param=param, remedy=remedy)


def matchers(
    sampling: SamplingParams, grammar: Grammar | None, vocab_size: int, tokenizer: Tokenizer | None
) -> list[TokenMatcher | None]:
    """Return what the tokens of each sample must match; None where any may come.

    Raises:
        InvalidRequestError: no token may come first.
    """
    inner: list[TokenMatcher | None] = [None] * sampling.num_samples
    if grammar is not None:
        inner = [grammar.matcher(ignore_eos=sampling.ignore_eos) for _ in inner]
    if not sampling.restricts_tokens:
        return inner
    bad_words: list[list[int]] = []
    if sampling.bad_words:
        assert tokenizer is not None, "refused before"
        bad_words = sequences_of(sampling.bad_words, tokenizer.encode_parts)
    restriction = Restriction(vocab_size, sampling.allowed_token_ids, bad_words)
    return [restriction.matcher(one) for one in inner]


def output_text(sampling: SamplingParams, prompt_token_ids: Sequence[int], tokenizer: Tokenizer | None) -> OutputText:
    """Return the text of one sample, which has none yet."""
    detokenizer = None
    if tokenizer is not None:
        detokenizer = tokenizer.detokenizer(
            prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            shown=sampling.shown_special_tokens,
        )
    keeps_stop = sampling.include_stop_str_in_output
    return OutputText(detokenizer, sampling.stop, sampling.min_tokens, keeps_stop=keeps_stop)


def matcher_error(request: Request, matcher: TokenMatcher) -> str:
    """Return why the output of ``request`` could not go on."""
    so_far = f"after {request.num_output_tokens} tokens"
    if matcher.field == FIELD:
        return f"The grammar became too complex {so_far}: {matcher.error}."
    return f"{matcher.field} leaves {matcher.error} {so_far}."
