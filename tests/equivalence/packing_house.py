"""A core, a scheduler and the fused decoder where older chunks are packed: what an engine is, without its thread."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from equivalence.coded_cases import some_constants
from pagefold.config import cache_dir
from pagefold.engine.masking import packing_keeps
from pagefold.kv import CODECS, KVCore, KVGeometry, audit
from pagefold.masks.calibration import _VERSION, scorer_path
from pagefold.masks.mask import ScoredMask
from pagefold.masks.rule import CHUNK
from pagefold.masks.scorer import Scorer
from pagefold.masks.scorer_file import FoundOn, KeptScorer, write_scorer
from pagefold.request import Request, StopRule
from pagefold.runner.codec_slab import CodecSlab
from pagefold.runner.content import content_fingerprint
from pagefold.runner.fused.decoder import FusedDecoder
from pagefold.runner.fused.formats import decoder_formats
from pagefold.runner.fused.weights import pack_model
from pagefold.runner.models import inspect_model
from pagefold.runner.slab import Slab, layout_on
from pagefold.runner.torch_runner import TorchRunner
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.masks.watched_model import WatchedModel
    from pagefold.runner.keeping import Keeping
    from pagefold.steps import StepPlan

__all__ = ["PackingHouse", "fit_thresholds", "keep_random_scorer", "random_scorer", "twin_logits"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def random_scorer(folder: Path, seed: int = 0) -> Scorer:
    """Return a scorer of any numbers for the model in a folder."""
    spec, random = inspect_model(folder), torch.Generator().manual_seed(seed)
    shape = len(spec.full_layers), spec.num_kv_heads
    weights = torch.randn(*shape, spec.fused.hidden_size, generator=random) / math.sqrt(spec.fused.hidden_size)
    biases = torch.randn(shape, generator=random)
    return Scorer.of_layers(spec.full_layers, spec.num_layers, weights, biases)._replace(quantiles=torch.zeros(2))


def keep_random_scorer(folder: Path) -> None:
    """Keep such a scorer where engines look for it: of scores about 0, so that a share keeps about as many."""
    scorer = random_scorer(folder)
    biases = torch.where(scorer.biases.isinf(), scorer.biases, 0.0)
    scorer = scorer._replace(biases=biases, quantiles=torch.linspace(-3, 3, 4097))
    found_on = FoundOn(_VERSION, content_fingerprint(folder, cache_dir()), 1, 1, "", 1.0, (0.5, 0.4, 0.6))
    file = scorer_path(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_scorer(file, KeptScorer(scorer, found_on))


def fit_thresholds(model: WatchedModel, scorer: Scorer, texts: list[list[int]], keep: float) -> torch.Tensor:
    """Return thresholds that keep about a share of texts, none of which any score is near: ``[L, Hkv]``.

    So it makes no difference to what is kept whether scores are computed in float32 or float64.
    """
    thresholds = torch.full_like(scorer.biases, math.inf if keep == 0 else -math.inf)
    if keep in {0, 1}:
        return thresholds
    for layer in model.spec.full_layers:  # what a layer keeps, those behind it see
        scores = []
        for text in texts:
            watcher = _Scores(scorer, layer)
            model.read(text, mask=ScoredMask(scorer, thresholds), watcher=watcher)
            scores.append(watcher.scores)
        for head, of_head in enumerate(torch.cat(scores, 1)):
            ranked = of_head.sort(descending=True).values
            middle = slice(max(0, round((keep - 0.05) * len(ranked))), round((keep + 0.05) * len(ranked)))
            gaps = (ranked[:-1] - ranked[1:])[middle]
            at = middle.start + int(gaps.argmax())
            thresholds[layer, head] = (ranked[at] + ranked[at + 1]) / 2
            assert gaps.max() > 1e-4, "scores that are so near that rounding decides"
    return thresholds


class _Scores:
    """Notes the scores of one layer."""

    def __init__(self, scorer: Scorer, layer: int) -> None:
        self._scorer, self._layer = scorer, layer
        self.scores = torch.zeros(0)

    def enters(self, entering) -> None:
        if entering.layer == self._layer:
            self.scores = self._scorer.scores(entering.layer, entering.hidden)

    def attends(self, layer, first, weights) -> None:
        pass


def twin_logits(model: WatchedModel, scorer: Scorer, thresholds: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Return what the model says under the very mask, dense, ``[T, vocab]``."""
    return model.read(text, mask=ScoredMask(scorer, thresholds))


class PackingHouse:
    """See the module.

    Args:
        folder: of the model.
        keeping: by what entries are kept.
        num_blocks, max_num_batched_tokens, num_threads, caches_prefixes: of the engine that it would be.
        dtype: that it computes in.
        codec: of K and V; empty for none.

    Attributes:
        logits: of each request, by how many tokens it had, what it sampled the next from.
        num_hit_tokens: of each request.
    """

    def __init__(
        self,
        folder: Path,
        keeping: Keeping,
        *,
        num_blocks: int = 400,
        max_num_batched_tokens: int = 4096,
        num_threads: int = 2,
        caches_prefixes: bool = True,
        dtype: str = "float32",
        block_size: int = 16,
        codec: str = "",
    ) -> None:
        spec, formats = inspect_model(folder), decoder_formats(dtype, None)
        torch_dtype = getattr(torch, dtype)
        self.geometry = KVGeometry(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, torch_dtype.itemsize, block_size,
            codec=CODECS[codec] if codec else None, keeps=packing_keeps(spec),
        )  # fmt: skip
        if codec:
            constants = some_constants(self.geometry.num_cells, spec.head_dim, 5)
            self.slab = CodecSlab.allocate(self.geometry, num_blocks, constants)
        else:
            layout = layout_on("cpu", in_pairs=dtype == "bfloat16")
            self.slab = Slab.allocate(self.geometry, num_blocks, torch_dtype, "cpu", layout)
        packed = pack_model(spec.fused, folder, spec.max_positions, formats, keeping)
        decoder = FusedDecoder(spec.fused, packed, self.slab, num_threads=num_threads, chunk_size=CHUNK)
        self.runner = _Logged(decoder, self.geometry, self.slab)
        self.runner.warm_up()
        rules = [group.keeps for group in self.geometry.groups]
        self.core = KVCore(num_blocks, block_size=block_size, rules=rules, enable_prefix_caching=caches_prefixes)
        self.scheduler = Scheduler(self.core, SchedulerLimits(16, max_num_batched_tokens))
        self.logits: dict[str, dict[int, torch.Tensor]] = {}
        self.num_hit_tokens: dict[str, int] = {}
        self._num_added = 0
        self._num_steps = 0

    def add(self, prompt: list[int], num_outputs: int) -> Request:
        """Let a request come."""
        name = f"r{self._num_added}"
        self._num_added += 1
        stop = StopRule(frozenset(), len(prompt) + num_outputs)
        request = Request(name, prompt, GREEDY, stop=stop, namespace=b"n", seed=0)
        self.logits[name] = {}
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        """Run one step."""
        self._num_steps += 1
        plan = self.scheduler.schedule(float(self._num_steps))
        result = self.runner.run(plan)
        in_step = self.scheduler.in_step
        for row, logits in zip(plan.sampling_rows, self.runner.sampled, strict=True):
            self.logits[in_step[row].request_id][in_step[row].num_tokens] = logits
        for request in in_step:
            self.num_hit_tokens.setdefault(request.request_id, request.num_cached_tokens)
        self.scheduler.apply(result)
        audit(self.core)

    def run(self) -> None:
        """Run all that is here to its end."""
        while self.scheduler.has_work:
            self.step()

    def outputs(self, prompts: list[list[int]], num_outputs: int) -> list[Request]:
        """Run prompts at once; return their requests."""
        requests = [self.add(prompt, num_outputs) for prompt in prompts]
        self.run()
        return requests


class _Logged(TorchRunner):
    """Notes the logits that are sampled from."""

    sampled: torch.Tensor

    def _compute(self, plan: StepPlan, moves):
        computed = super()._compute(plan, moves)
        self.sampled = computed.logits.clone()
        return computed
