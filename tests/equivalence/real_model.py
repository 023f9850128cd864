"""The equality rule for a real model in float32: what is compared, and how far it may be apart.

Matrix products round differently for other batch shapes, so tokens may differ where two logits are nearly equal. How
nearly is measured in the same run: ``noise`` is what transformers itself differs between batch 1 and batch 8.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from equivalence.suite import Budget, Setting, Trial, Workload, build

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from equivalence.references import References
    from pagefold.engine.engine import Engine
    from pagefold.events import Emit
    from pagefold.steps import StepPlan, StepResult
    from pagefold.tokenizer import Tokenizer

__all__ = ["LOGIT_BOUND", "Forced", "RealReferences", "real_prompts"]

LOGIT_BOUND = 1e-3

_QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences what a key-value cache is.",
    "Write a haiku about the sea.",
    "¿Cuál es la diferencia entre un árbol y un arbusto?",
    "Give me a Python function that reverses a list.",
    "日本の首都はどこですか。",
    "List three uses for a paper clip. 📎",
    "Translate 'good morning' into German.",
)


def real_prompts(tokenizer: Tokenizer, num_prompts: int, max_tokens: int) -> list[list[int]]:
    """Return prompts of real text: code, prose and chats, many of which begin alike.

    Args:
        tokenizer: of the model.
        num_prompts: how many.
        max_tokens: of the longest; lengths are spread from 1 up to it, more of them short.
    """
    code = tokenizer.encode((inspect.getsource(textwrap) + inspect.getsource(argparse))[:24_000])
    prose = tokenizer.encode(inspect.cleandoc(argparse.__doc__ or "") + (inspect.getdoc(textwrap.TextWrapper) or ""))
    prompts = []
    for number in range(num_prompts):
        length = max(1, int(max_tokens * ((number + 1) / num_prompts) ** 2))
        question = _QUESTIONS[number % len(_QUESTIONS)]
        if number % 3 == 0:
            prompts.append(code[:length])
        elif number % 3 == 1:
            start = 97 * number % 1000
            prompts.append(code[: length // 2] + code[start : start + length - length // 2])
        else:
            about = tokenizer.decode(prose[: max(0, length - 40)])
            system = f"You are a helpful assistant. {about}"
            prompts.append(
                tokenizer.encode_chat([{"role": "system", "content": system}, {"role": "user", "content": question}])
            )
    return prompts


class RealReferences:
    """Greedy outputs and logits of transformers, batch 1, and the noise of batch 8.

    Attributes:
        workload: the prompts.
        outputs: by prompt.
        logits: by prompt, ``[num_outputs, vocab]``.
        noise: the largest difference of a logit between batch 1 and batch 8.
    """

    def __init__(self, references: References, workload: Workload, pad_token_id: int) -> None:
        self.workload = workload
        self.outputs: list[list[int]] = []
        self.logits: list[torch.Tensor] = []
        for prompt in workload.prompts:
            output, logits = references.generate(prompt, eos_token_ids=None)
            self.outputs.append(output)
            self.logits.append(logits)
        self.noise = max(self._noise(references.model, group, pad_token_id) for group in self._groups(8))

    def gap(self, index: int, at: int, token_id: int) -> float:
        """Return by how much the reference prefers its own token to ``token_id``, as output ``at`` of a prompt."""
        logits = self.logits[index][at]
        return float(logits[self.outputs[index][at]] - logits[token_id])

    def _groups(self, size: int) -> list[list[int]]:
        """Return the prompts' indices in groups of similar length."""
        order = sorted(range(len(self.outputs)), key=lambda index: len(self.workload.prompts[index]))
        groups = [order[at : at + size] for at in range(0, len(order), size)]
        groups[-1] = order[-size:]  # a whole batch too
        return groups

    @torch.inference_mode()
    def _noise(self, model: Any, group: Sequence[int], pad_token_id: int) -> float:
        texts = [self.workload.prompts[index] + self.outputs[index][:-1] for index in group]
        width = max(map(len, texts))
        ids = torch.tensor([[pad_token_id] * (width - len(text)) + text for text in texts])
        mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=self.workload.num_outputs,
        ).logits
        return max(float((logits[row] - self.logits[index]).abs().max()) for row, index in enumerate(group))


@dataclass
class Forced:
    """A workload run with the reference's tokens in place of sampled ones, and what was seen on the way.

    Attributes:
        references: whose tokens.
        num_logits: rows of logits compared.
        error: the largest difference of a logit.
        first_differences: for prompts whose greedy output would have left the reference's: at which output, for which
            token.
    """

    references: RealReferences
    num_logits: int = 0
    error: float = 0.0
    first_differences: dict[int, tuple[int, int]] = field(default_factory=dict)

    def run(self, setting: Setting, folder: Path) -> Trial:
        """Run the whole workload in ``setting``, through a real scheduler."""
        trial = Trial(setting, self.references.workload, folder, self._build)
        trial.run()
        return trial

    def _build(self, setting: Setting, folder: Path, budget: Budget, emit: Emit) -> Engine:
        from pagefold.steps import StepResult

        engine = build(setting, folder, budget, emit)
        runner = engine.runner

        def run(plan: StepPlan) -> StepResult:
            logits = runner.logits(plan)
            rows = enumerate(zip(plan.seeds, plan.draws, strict=True))
            return StepResult([self._force(logits[row], index, at) for row, (index, at) in rows])

        runner.run = run
        return engine

    def _force(self, logits: torch.Tensor, index: int, at: int) -> int:
        forced = self.references.outputs[index][at]
        self.num_logits += 1
        self.error = max(self.error, float((logits - self.references.logits[index][at]).abs().max()))
        token_id = int(logits.argmax())
        if token_id != forced:
            self.first_differences[index] = min(self.first_differences.get(index, (at, token_id)), (at, token_id))
        return forced
