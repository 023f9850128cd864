"""transformers' ``generate``: all prompts in one padded batch. Settings: those of ``from_pretrained``."""

from __future__ import annotations

from typing import Any

import torch
from driver import Emit, Generate, serve
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class _Emitter(BaseStreamer):  # type: ignore[misc]
    """Is given the prompts first, and then the batch's new tokens, step by step."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            for index, token_id in enumerate(value.tolist()):
                self._emit(index, [token_id])
        self._is_prompt = False

    def end(self) -> None:
        pass


def start(model: str, settings: dict[str, Any]) -> Generate:
    """Return an engine that is ready."""
    module = AutoModelForCausalLM.from_pretrained(model, **settings).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_output_tokens: int, emit: Emit) -> None:
        width = max(map(len, prompts))
        token_ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(token_ids)
        for row, prompt in enumerate(prompts):
            token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        module.generate(
            token_ids,
            attention_mask=mask,
            max_new_tokens=num_output_tokens,
            min_new_tokens=num_output_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=_Emitter(emit),
        )

    return generate


if __name__ == "__main__":
    serve(start)
