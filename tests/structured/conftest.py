"""One compiler with the built-in model's vocabulary, and some tokens more that only the model has."""

from __future__ import annotations

import pytest
from grammar_walks import EOS, NUM_PADDED

from pagefold.structured.compiler import GrammarCompiler
from pagefold.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    return Tokenizer(smollm2)


@pytest.fixture(scope="session")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size + NUM_PADDED, (EOS,))
