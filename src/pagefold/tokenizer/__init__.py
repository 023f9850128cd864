"""Text to tokens and back, incrementally; chat templates."""

from pagefold.tokenizer.boundary import StablePrefix
from pagefold.tokenizer.chat_options import ChatOptions
from pagefold.tokenizer.detokenizer import Detokenizer
from pagefold.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatOptions", "Detokenizer", "StablePrefix", "Tokenizer"]
