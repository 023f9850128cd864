"""The evaluation: one exact engine and one for each setting, in one process, on the same tokens."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from pagefold import __version__
from pagefold.config import cache_dir
from pagefold.engine.planning import plan_engine
from pagefold.errors import ConfigError
from pagefold.hub.progress import Progress, silent
from pagefold.masks.rule import CHUNK
from pagefold.quality.contexts import Contexts, check_length, cut_contexts
from pagefold.quality.needles import DEPTHS, hide_needles
from pagefold.quality.reading import ContextFigures, read_side_by_side, stack
from pagefold.quality.result import Evaluation, GreedyResult, NeedleResult, PositionBin, SettingResult
from pagefold.quality.setting import EXACT
from pagefold.quality.statistics import Floats, bins_of, estimate
from pagefold.quality.subject import Subject
from pagefold.runner.content import content_fingerprint
from pagefold.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.config import EngineConfig
    from pagefold.quality.divergence import RowFigures
    from pagefold.quality.needles import Needle
    from pagefold.quality.setting import Setting
    from pagefold.quality.texts import Text

__all__ = ["Question", "evaluate"]

_AT_ONCE = 4
"""Contexts that are read, then continued from the cache together: the engines' blocks hold so many."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an evaluation is to find out.

    Attributes:
        settings: to be compared with the exact cache.
        texts: to be read.
        context_len: tokens of each context.
        num_contexts: how many contexts; None for eight, or as many as the texts have.
        num_greedy_tokens: of each greedy continuation; 0 for none.
        num_haystacks: in each of them a needle is hidden at every depth; 0 for none.
        num_bins: of positions.
        seed: of the needles, and of the bootstrap.
    """

    settings: Sequence[Setting]
    texts: Sequence[Text]
    context_len: int = 2048
    num_contexts: int | None = None
    num_greedy_tokens: int = 64
    num_haystacks: int = 2
    num_bins: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        names = [setting.name for setting in self.settings]
        if not names or len(set(names)) < len(names):
            msg = "No setting is named." if not names else "A setting is named twice."
            raise ConfigError(msg, remedy="Name each codec that is to be evaluated, once.")
        if self.num_bins < 1 or self.num_haystacks < 0 or self.num_greedy_tokens < 0:
            msg = "A number of bins, needles or greedy tokens is too small."
            raise ConfigError(msg, remedy="Give at least 1 bin, and 0 of the others for none.")
        if self.seed < 0:
            msg = f"seed is {self.seed}."
            raise ConfigError(msg, remedy="Give 0 or more.")
        check_length(self.context_len)
        if 2 * self.num_greedy_tokens > self.context_len:
            msg = f"{self.num_greedy_tokens} greedy tokens do not fit behind the half of {self.context_len}."
            remedy = f"Give at most {self.context_len // 2}, or a longer context."
            raise ConfigError(msg, remedy=remedy)


def evaluate(config: EngineConfig, question: Question, *, progress: Progress = silent) -> Evaluation:
    """Measure what settings cost against the exact cache.

    Args:
        config: of the engines; what the harness decides itself is overwritten: the length, the KV budget, no tiers.
        question: what is asked.
        progress: told how far it is.

    Raises:
        ConfigError: a setting, the text or a length cannot work; before weights are loaded where that can be known.
        NotCalibratedError: a share of older tokens is to be kept, and nobody has fitted a scorer to the model.
        ModelNotFoundError, UnsupportedModelError: the model cannot be used.
    """
    base = replace(
        config,
        kv_quality_floor=0.0,  # to find out is no use of it
        enable_prefix_caching=True,
        kv_offloading_size=0.0,
        kv_disk_path=None,
        kv_remote_url=None,
        kv_keep=(),
    )
    blueprint = plan_engine(replace(base, max_model_len="auto"), progress=progress)
    spec, longest = blueprint.spec, blueprint.limit.length
    if question.context_len >= longest:
        msg = f"The context length is {question.context_len}, and the model takes {longest} tokens at most."
        raise ConfigError(msg, remedy=f"Give at most {longest - 1}.")
    tokenizer = Tokenizer(spec.folder)
    contexts = cut_contexts(question.texts, tokenizer, question.context_len, question.num_contexts)
    configs = {
        setting.name: _sized(setting.apply(base), question.context_len) for setting in (EXACT, *question.settings)
    }
    haystacks = _haystacks(question, contexts, tokenizer)
    with contextlib.ExitStack() as opened:
        subjects = []
        for place, setting in enumerate((EXACT, *question.settings)):
            progress("starting engines", place, len(configs))
            subjects.append(Subject(setting, configs[setting.name]))
            opened.callback(subjects[-1].close)
        progress("starting engines", len(configs), len(configs))
        rows, greedy = _read_and_continue(subjects, contexts, question.num_greedy_tokens, progress)
        found = _find_needles(subjects, haystacks, tokenizer, progress)
    exact_perplexity = estimate(rows[0].surprise.mean(1, keepdims=True), _exp_mean, seed=question.seed)
    return Evaluation(
        model=config.model,
        fingerprint=content_fingerprint(spec.folder, cache_dir()),
        text=contexts.source,
        text_digest=contexts.digest,
        context_len=contexts.length,
        num_contexts=len(contexts.token_ids),
        num_tokens=rows[0].kl.size,
        exact_perplexity=exact_perplexity,
        exact_bytes_per_token=subjects[0].bytes_per_token,
        settings=tuple(
            _result(subject, question, (rows[0], rows[place]), (greedy[0], greedy[place]), (found[0], found[place]))
            for place, subject in enumerate(subjects)
            if place
        ),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
    )


def _sized(config: EngineConfig, context_len: int) -> EngineConfig:
    """Give an engine as many blocks as the contexts need that are in it at once, and room for unsealed ones."""
    config = replace(config, max_model_len=context_len + 1, kv_cache_memory_bytes=None)
    geometry = plan_engine(config).geometry
    num_each = geometry.layout.num_blocks_for(context_len + 1, config.max_num_batched_tokens)
    num_blocks = _AT_ONCE * (num_each + 1)
    num_bytes = num_blocks * geometry.bytes_per_block + config.max_num_seqs * geometry.residual_bytes
    return replace(config, kv_cache_memory_bytes=num_bytes)


def _haystacks(question: Question, contexts: Contexts, tokenizer: Tokenizer) -> list[list[Needle]]:
    rng = random.Random(question.seed)  # noqa: S311 - a puzzle, no secret
    own = contexts.token_ids
    return [hide_needles(own[place % len(own)], tokenizer, rng) for place in range(question.num_haystacks)]


_Outputs = list[list[int]]


def _read_and_continue(
    subjects: Sequence[Subject], contexts: Contexts, num_greedy_tokens: int, progress: Progress
) -> tuple[list[ContextFigures], list[_Outputs]]:
    """Return what each subject made of the contexts, and how it continued the begin of each."""
    of_contexts: list[list[RowFigures]] = []
    continued: list[_Outputs] = [[] for _ in subjects]
    num_done, num_all = 0, len(contexts.token_ids) * (contexts.length - 1)

    def show(num_tokens: int) -> None:
        nonlocal num_done
        num_done += num_tokens
        progress("reading", num_done, num_all)

    for first in range(0, len(contexts.token_ids), _AT_ONCE):
        batch = contexts.token_ids[first : first + _AT_ONCE]
        of_contexts += [read_side_by_side(subjects, token_ids, show) for token_ids in batch]
        if num_greedy_tokens:
            prompts = [token_ids[:-num_greedy_tokens] for token_ids in batch]
            for subject, outputs in zip(subjects, continued, strict=True):
                outputs.extend(subject.continue_all(prompts, num_greedy_tokens))
    return [stack(of_subject) for of_subject in zip(*of_contexts, strict=True)], continued


def _find_needles(
    subjects: Sequence[Subject], haystacks: Sequence[Sequence[Needle]], tokenizer: Tokenizer, progress: Progress
) -> list[list[list[bool]]]:
    """Return for each subject, haystack and depth whether the needle was found."""
    found: list[list[list[bool]]] = []
    num_all = len(subjects) * len(haystacks)
    for subject in subjects:
        of_subject = []
        for needles in haystacks:
            num_tokens = max(needle.num_tokens for needle in needles)
            outputs = subject.continue_all([needle.token_ids for needle in needles], num_tokens)
            texts = [tokenizer.decode(token_ids) for token_ids in outputs]
            of_subject.append([needle.is_found_in(text) for needle, text in zip(needles, texts, strict=True)])
            progress("looking for needles", len(found) * len(haystacks) + len(of_subject), num_all)
        found.append(of_subject)
    return found


def _result(
    subject: Subject,
    question: Question,
    rows: tuple[ContextFigures, ContextFigures],
    greedy: tuple[_Outputs, _Outputs],
    found: tuple[list[list[bool]], list[list[bool]]],
) -> SettingResult:
    """Put one setting's figures together; each pair is the exact cache's and its own."""
    exact, own = rows
    num_positions = own.kl.shape[1]
    first = 2 * CHUNK if subject.mask else 0  # before that nothing is removed
    changed = slice(first, num_positions)
    figures = _at(exact, own, changed, question.seed)
    return SettingResult(
        name=subject.setting.name,
        overrides=dict(subject.setting.overrides),
        transport=subject.setting.transport,
        dtype=subject.dtype,
        mask=subject.mask,
        num_tokens=own.kl[:, changed].size,
        bytes_per_token=subject.bytes_per_token,
        perplexity=float(np.exp(own.surprise[:, changed].mean())),
        perplexity_change=figures.perplexity_change,
        kl=figures.kl,
        kl_99=float(np.quantile(own.kl[:, changed], 0.99)),
        kl_max=float(own.kl[:, changed].max()),
        top1_agreement=figures.top1_agreement,
        bins=tuple(_at(exact, own, part, question.seed) for part in bins_of(num_positions, question.num_bins)),
        greedy=_greedy_result(*greedy, question) if question.num_greedy_tokens else None,
        needles=_needle_results(*found) if question.num_haystacks else (),
    )


def _at(exact: ContextFigures, own: ContextFigures, positions: slice, seed: int) -> PositionBin:
    return PositionBin(
        first=positions.start,
        last=positions.stop,
        perplexity_change=estimate(
            (own.surprise - exact.surprise)[:, positions].mean(1, keepdims=True), _exp_mean_less_1, seed=seed
        ),
        kl=estimate(own.kl[:, positions].mean(1, keepdims=True), _mean, seed=seed),
        top1_agreement=estimate(own.same_top[:, positions].mean(1, keepdims=True), _mean, seed=seed),
    )


def _greedy_result(exact: _Outputs, own: _Outputs, question: Question) -> GreedyResult:
    lengths = [_num_same(left, right) for left, right in zip(exact, own, strict=True)]
    return GreedyResult(
        num_tokens=question.num_greedy_tokens,
        same_tokens=estimate(np.array(lengths, dtype=np.float64)[:, None], _mean, seed=question.seed),
        num_texts=len(lengths),
        num_never_diverged=sum(length == question.num_greedy_tokens for length in lengths),
    )


def _num_same(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens come before the first difference."""
    differs = (place for place, (one, other) in enumerate(zip(left, right, strict=True)) if one != other)
    return next(differs, len(left))


def _needle_results(exact: list[list[bool]], own: list[list[bool]]) -> tuple[NeedleResult, ...]:
    return tuple(
        NeedleResult(
            depth=depth,
            num_needles=len(own),
            num_found_exact=sum(of_haystack[place] for of_haystack in exact),
            num_found=sum(of_haystack[place] for of_haystack in own),
        )
        for place, depth in enumerate(DEPTHS)
    )


def _mean(means: Floats) -> Floats:
    return means[..., 0]


def _exp_mean(means: Floats) -> Floats:
    return np.exp(means[..., 0])


def _exp_mean_less_1(means: Floats) -> Floats:
    return np.expm1(means[..., 0])
