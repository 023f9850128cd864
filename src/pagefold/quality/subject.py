"""Subject: an engine under one setting, made to read and to continue token sequences.

It is the engine that a server has: the scheduler cuts prompts into chunks, the runner writes their K and V into blocks
and attends to what the blocks then hold. Nothing of a setting is imitated here, but the way to a pool and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.config import DROPPED_BITS
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.errors import PagefoldError
from pagefold.quality.rounding import RoundingRunner, check_rounds
from pagefold.runner.torch_runner import TorchRunner
from pagefold.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pagefold.config import EngineConfig
    from pagefold.engine.outputs import OutputDelta
    from pagefold.quality.setting import Setting
    from pagefold.steps import StepPlan

__all__ = ["Subject"]

_READING = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)


class Subject:
    """An engine, started.

    Args:
        setting: the setting that the text is read under.
        config: the engine's, the setting included.

    Attributes:
        setting: as above.
        dtype: what it computes in.
        mask: names by what older tokens are kept, where a share is; else empty.
        first: the position of the first of ``rows``.
        rows: logits of the positions that were read last and not yet taken, ``[N, vocab]``, in the host's memory.
    """

    def __init__(self, setting: Setting, config: EngineConfig) -> None:
        blueprint = plan_engine(config)
        check_rounds(setting.transport, blueprint.geometry)
        self.setting = setting
        self.dtype = str(blueprint.dtype).removeprefix("torch.")
        self.mask = "" if blueprint.mask is None else blueprint.mask.names[0]
        self._longest = blueprint.capacity.max_model_len
        self._geometry = blueprint.geometry
        self._kept_shares: list[float] = []  # of older tokens, of each sequence that had any
        self.engine = build_engine(blueprint)
        runner = self.engine.runner
        assert isinstance(runner, TorchRunner), "logits are what torch runners have"
        runner.on_prompt_logits = self._note
        if DROPPED_BITS[setting.transport]:
            self.engine.runner = RoundingRunner(runner, setting.transport)
        self.first = 0
        self.rows: torch.Tensor | None = None
        self._num_requests = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the KV of its longest sequence, scales included; of layers with windows what they keep.

        Where a share of older tokens is kept, what was kept on the average of the sequences that were read.
        """
        num_bytes = self._geometry.layout.num_bytes_for(self._longest)
        if self._kept_shares:
            group, layout = self._geometry.packing, self._geometry.layout
            assert group is not None, "what was kept was packed"
            assert group.keeps.window is not None, "chunks have a size"
            num_older = group.keeps.num_packed(self._longest) * group.keeps.window
            removed = 1 - sum(self._kept_shares) / len(self._kept_shares)
            packed = sum(layer.bytes_per_token(layout.codec) for layer in layout.layers if layer.keeps.packs)
            num_bytes -= round(removed * num_older * packed)
        return round(num_bytes / self._longest)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Begin to read a text; nothing else may run."""
        self._add(token_ids, _READING)

    def read_on(self) -> None:
        """Compute until there are ``rows``, if none are left of before; None after the last position."""
        while self.rows is None and self.engine.has_requests:
            self._step()

    def take(self, num_rows: int) -> torch.Tensor:
        """Take the next rows, in order of position."""
        assert self.rows is not None, "nothing was read"
        taken, rest = self.rows[:num_rows], self.rows[num_rows:]
        self.first += num_rows
        self.rows = rest if len(rest) else None
        return taken

    def continue_all(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Return the next ``num_tokens`` greedy tokens of each prompt, which run together."""
        how = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs: dict[str, list[int]] = {self._add(prompt, how): [] for prompt in prompts}
        while self.engine.has_requests:
            for delta in self._step():
                outputs[delta.request_id] += delta.token_ids
        return list(outputs.values())

    def close(self) -> None:
        """Let go of what the engine holds beside memory."""
        self.engine.close()

    def _add(self, token_ids: Sequence[int], how: SamplingParams) -> str:
        self._num_requests += 1
        name = f"eval-{self._num_requests}"
        self.engine.add(name, list(token_ids), how)
        return name

    def _step(self) -> list[OutputDelta]:
        deltas = self.engine.step()
        for delta in deltas:
            if delta.error is not None:
                msg = f"The engine failed under the setting {self.setting.name}: {delta.error}"
                raise PagefoldError(msg)
            if delta.kept_share is not None:
                self._kept_shares.append(delta.kept_share)
        return deltas

    def _note(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Keep a step's rows: a copy, as the next step may be computed before they are taken.

        One request reads at a time, so a plan has one part; a step that failed comes again.
        """
        (part,) = plan.prompt_parts
        self.first, self.rows = plan.starts[part.row] + part.offset, logits.to("cpu", copy=True)
