"""GrammarCompiler: from what a client asks for to a compiled grammar, once for all that ask for the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from pagefold.memory.cache_size import CacheSize
from pagefold.memory.native import give_back_memory
from pagefold.structured.vetting import Vetter

if TYPE_CHECKING:
    from pagefold.structured.grammar import Grammar, GrammarSource, GrammarTokenizer
    from pagefold.structured.params import StructuredOutputsParams
    from pagefold.structured.vetting import Vetted

__all__ = ["GrammarCompiler"]

_MAX_GRAMMAR_BYTES = 96 * 2**20
"""What compiled grammars that are kept may take. Each counts as if it had grown as far as it may."""

_MAX_VETTED = 1024
_MAX_VETTED_BYTES = 8 * 2**20
_CHARACTER_BYTES = 4
_ENTRY_BYTES = 512
"""Bytes of a grammar that is known to be harmless: its texts, and what is around them."""

_MUCH_BYTES = 256 * 2**20
"""After grammars of so many bytes were forgotten, their memory is given back: that holds up others a little."""


class GrammarCompiler:
    """Compiles grammars, and keeps those that were used last. Any thread may call it.

    Two things are kept: which grammars were vetted, for long; and compiled grammars, each of which grows by the states
    that its outputs come through. A grammar that was forgotten lives on in the outputs that have it.

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
        self._vetted: OrderedDict[GrammarSource, Vetted] = OrderedDict()  # the last used at the end
        self._vetted_bytes = 0
        self._grammars: OrderedDict[GrammarSource, Grammar] = OrderedDict()  # likewise
        self._grammar_bytes = 0
        self._forgotten_bytes = 0

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
            if grammar is not None and not grammar.is_worn:
                self._grammars.move_to_end(source)
                return grammar
            tokenizer = self._tokenizer = self._tokenizer or self._make_tokenizer()
            vetted = self._vetted.get(source)
        if vetted is None:
            vetted = self._vetter.vet(source)
        grammar = Grammar(vetted.source, tokenizer, vetted.num_bytes)
        with self._lock:
            self._keep_vetted(source, vetted)
            self._keep(source, grammar)
            must_give_back = self._forgotten_bytes >= _MUCH_BYTES
            if must_give_back:
                self._forgotten_bytes = 0
        if must_give_back:
            give_back_memory()
        return grammar

    def sizes(self) -> list[CacheSize]:
        """Return what is kept. Plain reads, so any thread may ask."""
        return [
            CacheSize("grammars", self._grammar_bytes, _MAX_GRAMMAR_BYTES),
            CacheSize("vetted_grammars", self._vetted_bytes, _MAX_VETTED_BYTES),
        ]

    def _make_tokenizer(self) -> GrammarTokenizer:
        from pagefold.structured.grammar import GrammarTokenizer  # noqa: PLC0415 - native code

        return GrammarTokenizer(*self._of_model)

    def _keep(self, source: GrammarSource, grammar: Grammar) -> None:
        before = self._grammars.pop(source, None)  # worn; or another thread has compiled it meanwhile
        if before is not None:
            self._grammar_bytes -= before.max_bytes
        self._grammars[source] = grammar
        self._grammar_bytes += grammar.max_bytes
        while self._grammar_bytes > _MAX_GRAMMAR_BYTES:
            _, oldest = self._grammars.popitem(last=False)
            self._grammar_bytes -= oldest.max_bytes
            self._forgotten_bytes += oldest.max_bytes

    def _keep_vetted(self, source: GrammarSource, vetted: Vetted) -> None:
        if self._vetted.pop(source, None) is None:
            self._vetted_bytes += _entry_bytes(source, vetted)
        self._vetted[source] = vetted
        while len(self._vetted) > _MAX_VETTED or self._vetted_bytes > _MAX_VETTED_BYTES:
            oldest = self._vetted.popitem(last=False)
            self._vetted_bytes -= _entry_bytes(*oldest)


def _entry_bytes(source: GrammarSource, vetted: Vetted) -> int:
    return _CHARACTER_BYTES * (len(source.text) + len(vetted.source.text)) + _ENTRY_BYTES
