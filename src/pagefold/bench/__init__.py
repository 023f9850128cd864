"""The bench: a user's own workload against any OpenAI-compatible server, in figures that vLLM's bench has too."""

from pagefold.bench.load import LoadSettings, run_load
from pagefold.bench.prompts import Prompt, generate_prompts, read_prompts
from pagefold.bench.record import Record
from pagefold.bench.summary import summarize

__all__ = ["LoadSettings", "Prompt", "Record", "generate_prompts", "read_prompts", "run_load", "summarize"]
