"""Pagefold, through its library. Settings: those of ``pagefold.LLM``."""

from __future__ import annotations

from typing import Any

from driver import Emit, Generate, serve

from pagefold import LLM, SamplingParams


def start(model: str, settings: dict[str, Any]) -> Generate:
    """Return an engine that is ready."""
    engine = LLM(model, **settings).engine

    def generate(prompts: list[list[int]], num_output_tokens: int, emit: Emit) -> None:
        how = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.check(prompt, how)
            engine.add(str(index), prompt, how)
        while engine.has_work:
            for delta in engine.step():
                emit(int(delta.request_id), delta.token_ids)

    return generate


if __name__ == "__main__":
    serve(start)
