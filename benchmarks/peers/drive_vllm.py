"""vLLM, through its library. Settings: those of ``vllm.LLM``."""

from __future__ import annotations

from itertools import count
from typing import Any

from driver import Emit, Generate, serve


def start(model: str, settings: dict[str, Any]) -> Generate:
    """Return an engine that is ready."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(model, **settings).llm_engine
    names = count()

    def generate(prompts: list[list[int]], num_output_tokens: int, emit: Emit) -> None:
        how = SamplingParams(
            temperature=0.0,
            max_tokens=num_output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        index_of = {}
        for index, prompt in enumerate(prompts):
            name = str(next(names))
            index_of[name] = index
            engine.add_request(name, {"prompt_token_ids": prompt}, how)
        while engine.has_unfinished_requests():
            for output in engine.step():
                emit(index_of[output.request_id], output.outputs[0].token_ids)

    return generate


if __name__ == "__main__":
    serve(start)
