"""GrammarCompiler: from what a client asks for to a compiled grammar, once for all that ask for the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from pagefold.structured.vetting import Vetter

if TYPE_CHECKING:
    from pagefold.structured.grammar import Grammar, GrammarSource, GrammarTokenizer
    from pagefold.structured.params import StructuredOutputsParams

__all__ = ["GrammarCompiler"]

_MAX_GRAMMARS = 128
_MAX_CHARACTERS = 2**20


class GrammarCompiler:
    """Compiles grammars and keeps those that were used last. Any thread may call it.

    The library is loaded with the first grammar: a server that never sees one has none of its cost.

    Args:
        tokenizer_json: the text of the model's ``tokenizer.json``.
        vocab_size: of the model.
        eos_token_ids: of the model.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._of_model = (tokenizer_json, vocab_size, eos_token_ids)
        self._vetter = Vetter(*self._of_model)
        self._lock = threading.Lock()
        self._tokenizer: GrammarTokenizer | None = None
        self._grammars: OrderedDict[GrammarSource, Grammar] = OrderedDict()  # the last used at the end

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of ``params``. Blocks: milliseconds, or seconds for the first one and for harmful ones.

        Raises:
            InvalidRequestError: it does not compile, or takes too much; or this model's tokenizer does not work.
        """
        from pagefold.structured.grammar import grammar_source  # noqa: PLC0415 - native code

        grammar = self._compiled(grammar_source(params))
        return grammar if params.beginning is None else self._compiled(grammar.behind(params.beginning))

    def _compiled(self, source: GrammarSource) -> Grammar:
        from pagefold.structured.grammar import Grammar  # noqa: PLC0415 - native code

        with self._lock:
            grammar = self._grammars.get(source)
            if grammar is not None:
                self._grammars.move_to_end(source)
                return grammar
            tokenizer = self._tokenizer = self._tokenizer or self._make_tokenizer()
        grammar = Grammar(self._vetter.vet(source), tokenizer)
        with self._lock:
            self._grammars[source] = grammar
            self._forget_old()
        return grammar

    def _make_tokenizer(self) -> GrammarTokenizer:
        from pagefold.structured.grammar import GrammarTokenizer  # noqa: PLC0415 - native code

        return GrammarTokenizer(*self._of_model)

    def _forget_old(self) -> None:
        num_characters = sum(len(source.text) for source in self._grammars)
        while len(self._grammars) > _MAX_GRAMMARS or (num_characters > _MAX_CHARACTERS and len(self._grammars) > 1):
            source, _ = self._grammars.popitem(last=False)
            num_characters -= len(source.text)
