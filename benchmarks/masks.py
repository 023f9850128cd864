"""Masks: what it costs to keep only some of the older tokens, beside other ways to choose as many.

SmolLM2-135M-Instruct in float32 reads contexts of State of the Union addresses and Moby-Dick, teacher-forced, by the
watched model: every query meets all keys, and what the mask hides has no weight. So this is what masks do to what the
model says, and nothing of memory or speed. All read the same contexts; the exact cache is the same model with no mask.

A query sees its own chunk of 256 tokens and the one before it whole, the first 4 tokens, and of what is between, the
*older* tokens, what was kept. Thresholds are those that keep 50 % and 25 % of the calibration's tokens; how much was
removed of the contexts is shown. The scorer is calibrated first, if it is not kept yet, on a text that comes with
Pagefold and on the last tenth of each default text; contexts are of the rest. So texts are others, by the same authors.

* KeyDiff (Park et al., 2025; arXiv 2504.15364): keeps keys that are least like the mean of all, by cosine.
* key norms (Devoto et al., 2024; arXiv 2406.11430): keeps keys with the smallest norms. Its authors leave the first two
  layers alone; here they are not.
* StreamingLLM (Xiao et al., 2023): keeps the last tokens.

Each of them chooses anew for every chunk of queries from all that is older then, and keeps in each KV head as many as
the mask keeps of it in that chunk, mean over layers and KV heads. That is more than a cache could do, which does not
get back what it let go of.

"Dense prefill, pruned decoding" is KVzap's own setting: the first half of a context is computed with all tokens in
sight, and what follows sees what was kept of it. Figures are of the second half, and beside them those of the mask that
is there from the first token on.

* perplexity: over all positions of a context, relative to the exact cache's, with a standard error over contexts.
* KL divergence: from the exact cache's next-token distribution, of positions, in nats.

    python benchmarks/masks.py [--num-texts 8] [--length 2048] [--long] [--seed 0] [--json FILE]

``--long`` adds a quarter as many contexts of 8,192 tokens, for which SmolLM2 was made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from report import Row, machine, parser, print_report
from rich.progress import Progress

from pagefold.cli.fit_scorer import ensure_scorer
from pagefold.cli.models import progress_bar
from pagefold.config import cache_dir
from pagefold.hub.catalog import resolve
from pagefold.masks.mask import ScoredMask
from pagefold.masks.rule import CHUNK, NUM_SINKS, older
from pagefold.masks.watched_model import WatchedModel
from pagefold.quality.divergence import compare_rows
from pagefold.quality.reserved import for_evaluating
from pagefold.quality.statistics import estimate
from pagefold.quality.texts import fetch_default_texts
from pagefold.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.masks.scorer_file import KeptScorer
    from pagefold.masks.watched_model import Entering, Mask, SeenRows
    from pagefold.quality.divergence import RowFigures
    from pagefold.quality.texts import Text

MODEL = "smollm2-135m"
ASKED = {0.5: 0.01, 0.75: 0.03}
"""By the share of older tokens that is removed, how much higher perplexity may be."""
LEAST, LONG = 1024, 8192
CHARACTERS_PER_TOKEN = 12


class Ranking(Protocol):
    """Says which keys go first; the largest stay."""

    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        """Return ranks of keys ``[Hkv, N, D]``: ``[Hkv, N]``."""
        ...


def key_diff(keys: torch.Tensor) -> torch.Tensor:
    """Rank keys by how little they are like the mean of all."""
    directions = torch.nn.functional.normalize(keys, dim=-1)
    return -torch.nn.functional.cosine_similarity(keys, directions.mean(1, keepdim=True), dim=-1)


def key_norms(keys: torch.Tensor) -> torch.Tensor:
    """Rank keys by how small they are."""
    return -keys.norm(dim=-1)


def recency(keys: torch.Tensor) -> torch.Tensor:
    """Rank keys by how late they are."""
    return torch.arange(keys.shape[1]).expand(keys.shape[:2])


PEERS: dict[str, Ranking] = {"KeyDiff": key_diff, "key norms": key_norms, "StreamingLLM": recency}


class RankedMask:
    """The best of what is older for each chunk of queries, of every KV head as many.

    Args:
        ranking: which are the best.
        shares: for the chunk of queries that begins at a position, the share that is kept.
    """

    def __init__(self, ranking: Ranking, shares: dict[int, float]) -> None:
        self.ranking = ranking
        self.shares = shares

    def of_layer(self, entering: Entering) -> SeenRows:
        """Return what queries of a layer see."""
        keys = entering.keys

        def seen(first: int, last: int) -> torch.Tensor:
            found = torch.ones(len(keys), 1, last, dtype=torch.bool)
            concerned = older(first)
            if concerned:
                ranks = self.ranking(keys[:, concerned.start : concerned.stop])
                num = round(self.shares[first] * len(concerned))
                best = ranks.topk(num, -1).indices + concerned.start
                found[:, 0, concerned.start : concerned.stop] = False
                found[:, 0].scatter_(1, best, value=True)
            return found

        return seen


def kept_shares(mask: ScoredMask, length: int) -> dict[int, float]:
    """Return the share of older tokens that a mask kept, for each chunk of queries that has any; by where it begins."""
    kept = torch.stack([mask.kept[layer] for layer in sorted(mask.kept)]).double().mean((0, 1))
    return {
        first: float(kept[NUM_SINKS : older(first).stop].mean()) for first in range(0, length, CHUNK) if older(first)
    }


@dataclass
class Found:
    """What one way to choose did to all contexts.

    Attributes:
        figures: of each context.
        removed: the share of older tokens that it removed, of each context at its end.
    """

    figures: list[RowFigures] = field(default_factory=list)
    removed: list[float] = field(default_factory=list)

    def change(self, exact: Found, part: slice = slice(None)) -> tuple[float, float]:
        """Return by what share perplexity is higher over some positions, and the standard error."""
        pairs = zip(self.figures, exact.figures, strict=True)
        means = np.array([[(one.surprise - other.surprise)[part].mean()] for one, other in pairs])
        found = estimate(means, lambda columns: np.expm1(columns[..., 0]))
        return found.value, found.standard_error or 0.0

    def kl(self, quantile: float, part: slice = slice(None)) -> float:
        """Return a quantile of the divergence over some positions."""
        return float(np.quantile(np.concatenate([one.kl[part] for one in self.figures]), quantile))

    def mean_kl(self, part: slice = slice(None)) -> float:
        """Return the mean divergence over some positions."""
        return float(np.mean([figures.kl[part].mean() for figures in self.figures]))


def contexts(texts: Sequence[Text], tokenizer: Tokenizer, length: int, num: int, seed: int) -> list[list[int]]:
    """Return contexts at random places of the parts that are for evaluating, from each text in turn."""
    random, found = Random(seed), []
    parts = for_evaluating(texts)
    for place in range(num):
        content = parts[place % len(parts)].content
        start = random.randrange(len(content) - length * CHARACTERS_PER_TOKEN)
        start = content.find("\n", start) + 1
        piece = tokenizer.encode_rendered(content[start : start + length * CHARACTERS_PER_TOKEN])
        begin = tokenizer.encode("")
        found.append([*begin, *piece[: length - len(begin)]])
    return found


class Reading:
    """Contexts, read in every way.

    Attributes:
        found: by the way's name and the share that is removed.
    """

    def __init__(self, model: WatchedModel, kept: KeptScorer, advance: Callable[[], object]) -> None:
        self.model = model
        self.kept = kept
        self.advance = advance
        self.found: dict[tuple[str, float], Found] = {}

    def read(self, token_ids: Sequence[int]) -> None:
        """Read one context in every way."""
        exact = self.model.read(token_ids)[:-1]
        self._note(("exact", 0.0), [exact, exact], token_ids)
        for removed in ASKED:
            thresholds = self.kept.scorer.thresholds(1 - removed)
            mask = ScoredMask(self.kept.scorer, thresholds)
            pruned = ScoredMask(self.kept.scorer, thresholds, num_dense=middle(len(token_ids)))
            self._compare(("mask", removed), exact, mask, token_ids)
            shares = kept_shares(mask, len(token_ids))
            self._compare(("dense prefill", removed), exact, pruned, token_ids)
            for name, ranking in PEERS.items():
                self._compare((name, removed), exact, RankedMask(ranking, shares), token_ids)
            for name in ("mask", "dense prefill", *PEERS):
                self.found[name, removed].removed.append(1 - list(shares.values())[-1])

    def _compare(self, name: tuple[str, float], exact: torch.Tensor, mask: Mask, token_ids: Sequence[int]) -> None:
        self._note(name, [exact, self.model.read(token_ids, mask=mask)[:-1]], token_ids)

    def _note(self, name: tuple[str, float], logits: list[torch.Tensor], token_ids: Sequence[int]) -> None:
        found = self.found.setdefault(name, Found())
        found.figures.append(compare_rows(logits, token_ids[1:])[-1])
        self.advance()


def middle(length: int) -> int:
    """Return where the second half of a context begins: with a chunk."""
    return length // 2 // CHUNK * CHUNK


def rows_of(found: dict[tuple[str, float], Found], length: int, *, where: str) -> list[Row]:
    """Return the figures of contexts of one length."""
    exact, rows = found["exact", 0.0], []
    second = slice(middle(length), None)
    for removed, limit in ASKED.items():
        mask = found["mask", removed]
        what = f"{removed:.0%} removed"
        rows.append(_row(mask, exact, f"mask, {what}, {where}", asked=limit))
        for name in PEERS:
            peer = found[name, removed]
            rows.append(_row(peer, exact, f"{name}, as many, {where}"))
        best = min(found[name, removed].change(exact)[0] for name in PEERS)
        change = mask.change(exact)[0]
        rows.append(
            Row(
                f"mask, {what}, less than the best of these, {where}",
                f"< {best:+.2%}",
                f"{change:+.2%}",
                change < best,
                {"mask": change, "best_peer": best},
            )
        )
        rows.append(
            _row(found["dense prefill", removed], exact, f"dense prefill, {what}, second half, {where}", second)
        )
        rows.append(_row(mask, exact, f"mask, {what}, second half, {where}", second))
    return rows


def _row(one: Found, exact: Found, what: str, part: slice = slice(None), asked: float | None = None) -> Row:
    change, error = one.change(exact, part)
    divergence, mean, removed = one.kl(0.999, part), one.mean_kl(part), float(np.mean(one.removed))
    got = f"{change:+.2%} ± {error:.2%}, KL 99.9th {divergence:.2g}, mean {mean:.2g}, {removed:.0%} removed"
    values = {
        "perplexity_change": change,
        "standard_error": error,
        "kl_mean": mean,
        "kl_99_9": divergence,
        "top1_agreement": float(np.mean([figures.same_top[part].mean() for figures in one.figures])),
        "removed": removed,
    }
    if asked is None:
        return Row(f"perplexity: {what}", "", got, None, values)
    return Row(f"perplexity: {what}", f"<= +{asked:.0%}", got, change <= asked, values)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--num-texts", type=int, default=8, help="how many contexts")
    made.add_argument("--length", type=int, default=2048, help="tokens of each")
    made.add_argument("--long", action="store_true", help=f"also a quarter as many of {LONG:,} tokens")
    made.add_argument("--seed", type=int, default=0, help="of the places of contexts")
    arguments = made.parse_args(argv)
    if not LEAST <= arguments.length <= LONG:
        made.error(f"--length is {arguments.length}: it is {LEAST} to {LONG}")
    with progress_bar() as progress:
        folder = resolve(MODEL, cache_dir(), progress=progress)
        texts = fetch_default_texts(cache_dir(), progress=progress)
        kept = ensure_scorer(MODEL, progress)
    model, tokenizer = WatchedModel(folder), Tokenizer(folder)
    mean, least, greatest = kept.found_on.explained
    rows = [
        Row(
            "variance of log attention that scores explain, in contexts held out from the fit",
            "",
            f"{mean:.0%}; of single KV heads {least:.0%} to {greatest:.0%}",
            None,
            {"digest": kept.scorer.digest, "tokens": kept.found_on.num_tokens},
        )
    ]
    lengths = {arguments.length: arguments.num_texts}
    if arguments.long:
        lengths[LONG] = max(1, arguments.num_texts // 4)
    for length, num in lengths.items():
        cut = contexts(texts, tokenizer, length, num, arguments.seed)
        with Progress(transient=True) as bar:
            task = bar.add_task(f"reading {length:,}", total=num * (1 + len(ASKED) * (2 + len(PEERS))))
            reading = Reading(model, kept, partial(bar.advance, task))
            for token_ids in cut:
                reading.read(token_ids)
        found = reading.found
        perplexity = float(np.exp(np.mean([one.surprise.mean() for one in found["exact", 0.0].figures])))
        rows.append(Row(f"perplexity: exact, {num} contexts of {length:,}", "", f"{perplexity:.3f}", None, {}))
        rows += rows_of(found, length, where=f"{num} contexts of {length:,}")
    print_report("masks", rows, machine(), arguments.json)


if __name__ == "__main__":
    main()
