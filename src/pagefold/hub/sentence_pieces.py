"""SentencePiece's BPE out of GGUF metadata: no word boundaries, spaces as ``▁``, bytes for the rest.

Llama, Mistral and Phi 3 have it with a space before each text, and before what follows a token that is matched
literally; Gemma has it without.

SentencePiece has no list of merges. Two neighbours merge if together they are a token, the pair of the best score
first. ``tokenizer.json`` wants the pairs, in that order: they are all the ways to cut each token into two others.

Tokens that users defined are found before anything is merged, the longest at each place, and never merge. GGUF spells
them with spaces, and Gemma's look for them when spaces are ``▁`` already. With a space before each text they are found
as they are spelled: else that space would be theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.errors import UnsupportedModelError
from pagefold.gguf.header import GgufFormatError
from pagefold.hub.around_texts import post_processor
from pagefold.hub.vocabulary import BYTE, CONTROL, MATCHED_LITERALLY, NORMAL, UNKNOWN, USER_DEFINED, refuse_setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.gguf.header import GgufHeader
    from pagefold.hub.vocabulary import Vocabulary

__all__ = ["sentence_piece_tokenizer"]

_SPACE = "▁"
_BARE = ("<unk>", "<s>", "<|endoftext|>")
"""Of Phi 3's special tokens, those behind which spaces do count."""
_REMEDY = "Use the model's original folder, which has a tokenizer.json."


def sentence_piece_tokenizer(gguf: GgufHeader, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of ``tokenizer.json``.

    Raises:
        UnsupportedModelError: it changes texts before it cuts them, or lacks a byte.
        GgufFormatError: scores, or a token that others need, are missing.
    """
    refuse_setting(gguf, "remove_extra_whitespaces", default=False)
    if "tokenizer.ggml.precompiled_charsmap" in gguf.metadata:
        message = f"{gguf.path} has a tokenizer with a precompiled_charsmap, which is not converted."
        raise UnsupportedModelError(message, remedy=_REMEDY)
    begins_with_space = gguf.value("tokenizer.ggml.add_space_prefix", bool, default=True)
    tokens = vocabulary.tokens if begins_with_space else _respelled(gguf, vocabulary)
    # Behind Phi 3's special tokens no space counts.
    eats_spaces = {"rstrip": gguf.value("general.architecture", str) == "phi3"}
    added: list[dict[str, Any]] = []
    for token_id, (token, type_) in enumerate(zip(tokens, vocabulary.types, strict=True)):
        if type_ in (UNKNOWN, CONTROL):
            strips = eats_spaces if token not in _BARE else {}
            added.append({"id": token_id, "content": token, "special": True, **MATCHED_LITERALLY, **strips})
        elif type_ == USER_DEFINED:
            is_respelled = {"normalized": not begins_with_space}
            added.append({"id": token_id, "content": token, "special": False, **MATCHED_LITERALLY, **is_respelled})
    bytes_here = {token for token, type_ in zip(tokens, vocabulary.types, strict=True) if type_ == BYTE}
    if bytes_here != {f"<0x{byte:02X}>" for byte in range(256)}:
        message = f"{gguf.path} has a tokenizer without a token for each byte, which is not converted."
        raise UnsupportedModelError(message, remedy=_REMEDY)
    if "unk_token" not in vocabulary.special:
        message = f"{gguf.path}: its tokenizer has no unknown token."
        raise GgufFormatError(message)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _normalizer(begins_with_space),
        "pre_tokenizer": None,
        "post_processor": post_processor(gguf, vocabulary, begins=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins_with_space else []),
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.special["unk_token"],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": _merges(tokens, vocabulary.types, _scores(gguf, len(tokens))),
        },
    }


def _respelled(gguf: GgufHeader, vocabulary: Vocabulary) -> list[str]:
    """Return the tokens as they are found where spaces are ``▁`` already."""
    tokens = [
        token.replace(" ", _SPACE) if type_ == USER_DEFINED else token
        for token, type_ in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    if len(set(tokens)) != len(tokens):
        message = f"{gguf.path}: two of its tokens differ in nothing but the spelling of spaces."
        raise GgufFormatError(message)
    return tokens


def _scores(gguf: GgufHeader, num_tokens: int) -> list[float]:
    scores = gguf.values("tokenizer.ggml.scores", float)
    if len(scores) != num_tokens:
        message = f"{gguf.path}: it has {num_tokens} tokens and {len(scores)} scores."
        raise GgufFormatError(message)
    return scores


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every pair of normal tokens that together are one, the best first."""
    score_of = {tokens[i]: scores[i] for i in range(len(tokens)) if types[i] == NORMAL}
    merges = []
    # Sorting keeps the order of equals: of tokens of one score the first, of one token the cut farthest to the left.
    for token in sorted(score_of, key=score_of.__getitem__, reverse=True):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [pair for pair in cuts if pair[0] in score_of and pair[1] in score_of]
    return merges


def _normalizer(begins_with_space: bool) -> dict[str, Any]:  # noqa: FBT001 - of one word
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if not begins_with_space:
        return spaces
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, spaces]}
