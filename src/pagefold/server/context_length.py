"""Context length: refuses at the door what the model's context cannot hold, in OpenAI's words.

:meth:`Engine.check` refuses it too, for those who come without the door, in words of the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.server.errors import ContextLengthError

if TYPE_CHECKING:
    from pagefold.memory.limit import Limit
    from pagefold.tokenizer import Tokenizer

__all__ = ["check_prompt", "check_text", "check_tokens"]

_MAX_CHARACTERS, _MAX_CHARACTERS_A_TOKEN = 2**20, 8
"""A text has at most so many characters, or so many for each token of the context if that is more: where no fewer
 tokens can be proven to be too many, this bounds what tokenizing takes, in seconds and in memory."""


def check_text(text: str, tokenizer: Tokenizer, context: Limit, param: str, times: int = 1) -> None:
    """Refuse before it is tokenized what cannot fit: tokenizing takes seconds a megabyte, and 300 times its memory.

    Where a vocabulary proves nothing of a text's tokens, its characters alone are bounded.

    Args:
        text: a prompt.
        tokenizer: the model's.
        context: how many tokens it has, and why no more.
        param: the field that the text came in.
        times: so many times as much as fits is too much.

    Raises:
        ContextLengthError: it is certainly too long.
    """
    max_characters = times * max(_MAX_CHARACTERS, _MAX_CHARACTERS_A_TOKEN * context.length)
    num_tokens = tokenizer.min_tokens(text)
    if num_tokens >= context.length * times:
        msg = (
            f"{_told(context)}. However, the {param} has "
            f"{len(text)} characters, which are at least {num_tokens} tokens."
        )
    elif len(text) > max_characters:
        msg = f"The {param} has {len(text)} characters; for {context.length} tokens at most {max_characters} are read."
    else:
        return
    raise ContextLengthError(msg, param=param, remedy=context.or_without(f"Please reduce the length of the {param}"))


def check_prompt(num_prompt_tokens: int, max_tokens: int | None, context: Limit, param: str) -> None:
    """Refuse a prompt that does not fit with the tokens that are asked for behind it.

    Raises:
        ContextLengthError: it does not.
    """
    wanted = max(1, max_tokens or 1)  # without any too, one must be left
    if not num_prompt_tokens or num_prompt_tokens + wanted <= context.length:
        return
    msg = (
        f"{_told(context)}. However, you requested "
        f"{num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the {param}, {wanted} in the completion)."
    )
    remedy = context.or_without(f"Please reduce the length of the {param} or completion")
    raise ContextLengthError(msg, param=param, remedy=remedy)


def check_tokens(num_tokens: int, context: Limit, param: str) -> None:
    """Refuse more tokens than the context has.

    Raises:
        ContextLengthError: there are more.
    """
    if num_tokens > context.length:
        msg = f"{_told(context)}, and there are {num_tokens}."
        raise ContextLengthError(msg, param=param, remedy="Send them in parts.")


def _told(context: Limit) -> str:
    told = f"This model's maximum context length is {context.length} tokens"
    return f"{told}, beyond which {context.why}" if context.why else told
