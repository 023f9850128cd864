"""The calibration of masks: a model's scorer, fitted once to what it does with texts, and kept in the cache folder.

Texts are cut into contexts. Each is read and recited (:mod:`~pagefold.masks.attention_got`); for each layer and KV head
a ridge regression predicts the logarithm of what a key gets from what enters the layer's attention (KVzap; arXiv
2601.07891, section 3). Every fourth context is held out, to choose the penalty and to say how good the scores are; the
scorer is fitted to all. Then all contexts are read once more, and quantiles of their scores say which threshold keeps
which share.

Sinks are left out: they are kept whatever they get, and their hidden states are like no other's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pagefold.config import cache_dir
from pagefold.errors import ConfigError, UnsupportedModelError
from pagefold.hub.progress import Progress, silent
from pagefold.masks.attention_got import attention_got, num_positions_for, recitals
from pagefold.masks.fitting import NormalEquations, fit_ridge
from pagefold.masks.rule import CHUNK, NUM_SINKS
from pagefold.masks.scorer import Scorer
from pagefold.masks.scorer_file import FoundOn, KeptScorer, read_scorer, write_scorer
from pagefold.masks.watched_model import WatchedModel, check_plain
from pagefold.runner import codecs
from pagefold.runner.content import content_fingerprint
from pagefold.runner.models import inspect_model
from pagefold.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.masks.watched_model import Entering
    from pagefold.runner.models import ModelSpec

__all__ = ["DEFAULT_NUM_CONTEXTS", "calibrate", "kept_scorer", "scorer_path", "shipped_text"]

DEFAULT_NUM_CONTEXTS = 6
_CONTEXT_LEN, _LEAST_CONTEXT_LEN = 2048, 4 * CHUNK
_HELD_OUT_OF = 4
"""Every context of so many is held out: the last of them, or of fewer."""
_LEAST_GOT = 1e-6
"""What a key is taken to get at least: the logarithm of less says nothing."""
_NUM_QUANTILES = 4097
_CHARACTERS_PER_TOKEN = 12
"""Characters that are read for each token: more than a token has in any text that people write."""
_VERSION = 1
"""The version of what is measured, and of the file."""


def shipped_text() -> str:
    """Return the text that comes with Pagefold: what codecs are calibrated on, too."""
    return Path(codecs.__file__).with_name("calibration.txt").read_text(encoding="utf-8")


def scorer_path(folder: Path) -> Path:
    """Return where the scorer of a model's folder is kept, whether there is one or not."""
    facts = _VERSION, content_fingerprint(folder, cache_dir()), CHUNK, NUM_SINKS
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    return cache_dir() / "calibration" / f"{name}.masks"


def kept_scorer(folder: Path) -> KeptScorer | None:
    """Return the scorer that was kept for the weights in a model's folder; None where none is, or it is damaged."""
    return read_scorer(scorer_path(folder), _VERSION, content_fingerprint(folder, cache_dir()))


def calibrate(
    folder: Path, texts: Sequence[str], *, num_contexts: int = DEFAULT_NUM_CONTEXTS, progress: Progress = silent
) -> KeptScorer:
    """Find the scorer of a model, and keep it in the cache folder in place of one that is there.

    Args:
        folder: the model's.
        texts: what it is found on; each gives contexts in turn, spread over it.
        num_contexts: how many, at most.
        progress: told how far it is.

    Raises:
        ConfigError: the texts are too short, the number too small, or the cache folder cannot be written.
        ModelNotFoundError: there are no weights.
        UnsupportedModelError: the model has too few positions, or its attention is not plain.
    """
    spec = inspect_model(folder)
    check_plain(spec)
    context_len = _context_len(spec)
    tokenizer = Tokenizer(folder)
    contexts = _contexts(texts, tokenizer, context_len, num_contexts)
    file = scorer_path(folder)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"Cannot write to {file.parent}: {error.strerror or error}."
        raise ConfigError(msg, remedy="Set PAGEFOLD_CACHE to a folder that can be written.") from None
    model = WatchedModel(folder)
    sizes = len(spec.full_layers), model.num_features, spec.num_kv_heads
    fitted, held_out = NormalEquations(*sizes), NormalEquations(*sizes)
    for place, token_ids in enumerate(contexts):
        progress("measuring attention", place, len(contexts))
        _add(held_out if _is_held_out(place, len(contexts)) else fitted, model, token_ids, tokenizer)
    fit = fit_ridge(fitted, held_out)
    assert fit.explained is not None, "contexts were held out"
    scorer = Scorer.of_layers(spec.full_layers, spec.num_layers, fit.weights.float(), fit.biases.float())
    seen = _Scores(scorer, spec.full_layers)
    for place, token_ids in enumerate(contexts):
        progress("finding thresholds", place, len(contexts))
        model.read_on(token_ids, None, watcher=seen)
    progress("finding thresholds", len(contexts), len(contexts))
    explained = tuple(float(one) for one in (fit.explained.mean(), fit.explained.min(), fit.explained.max()))
    found_on = FoundOn(
        version=_VERSION,
        fingerprint=content_fingerprint(folder, cache_dir()),
        num_tokens=sum(map(len, contexts)),
        context_len=context_len,
        text_digest=hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        penalty=fit.penalty,
        explained=explained,  # type: ignore[arg-type] # three of them
    )
    kept = KeptScorer(scorer._replace(quantiles=seen.quantiles()), found_on)
    write_scorer(file, kept)
    return kept


def _context_len(spec: ModelSpec) -> int:
    """Return how long contexts are: whole chunks, and as many as the model can recite.

    Raises:
        UnsupportedModelError: it can recite less than it takes for queries to have older tokens.
    """
    longest = spec.windowed_limit.length
    fitting = [num for num in range(_LEAST_CONTEXT_LEN, _CONTEXT_LEN + 1, CHUNK) if num_positions_for(num) <= longest]
    if not fitting:
        needed = num_positions_for(_LEAST_CONTEXT_LEN)
        msg = f"{spec.model_type} ({spec.folder.name}) takes {longest:,} tokens at most, and a calibration {needed:,}."
        raise UnsupportedModelError(msg, remedy="Of so few tokens masks would keep nearly all; serve it without.")
    return fitting[-1]


def _contexts(texts: Sequence[str], tokenizer: Tokenizer, length: int, num: int) -> list[list[int]]:
    """Return at most ``num`` contexts: one of each text, then the second of each, and so on.

    Raises:
        ConfigError: there are fewer than two.
    """
    if num < 2:  # noqa: PLR2004 - one is fitted to, one held out
        msg = f"The number of contexts is {num}."
        raise ConfigError(msg, remedy="Give at least 2: one is held out.")
    begin = tokenizer.encode("")
    of_texts = [_of_text(text, tokenizer, length - len(begin), num) for text in texts]
    turns = [one[turn] for turn in range(num) for one in of_texts if turn < len(one)]
    contexts = [begin + own for own in turns[:num]]
    if len(contexts) < 2:  # noqa: PLR2004
        msg = f"The text has {len(contexts)} contexts of {length:,} tokens, and a calibration takes at least 2."
        raise ConfigError(msg, remedy="Give a longer text: some 30,000 characters, or more.")
    return contexts


def _of_text(text: str, tokenizer: Tokenizer, num_tokens: int, num: int) -> list[list[int]]:
    """Return at most ``num`` pieces of a text, of so many tokens each, spread over it, and never overlapping."""
    num_characters = num_tokens * _CHARACTERS_PER_TOKEN
    if len(text) >= num * num_characters:
        starts = [place * (len(text) // num) for place in range(num)]
        found = [tokenizer.encode_rendered(text[start : start + num_characters])[:num_tokens] for start in starts]
    else:
        token_ids = tokenizer.encode_rendered(text[: num * num_characters])
        found = [token_ids[start : start + num_tokens] for start in range(0, len(token_ids), num_tokens)][:num]
    return [own for own in found if len(own) == num_tokens]


def _is_held_out(place: int, num: int) -> bool:
    every = min(_HELD_OUT_OF, num)
    return place % every == every - 1


def _add(sums: NormalEquations, model: WatchedModel, token_ids: list[int], tokenizer: Tokenizer) -> None:
    """Add a context's tokens: features are what enters attention, outputs the logarithm of what their keys get."""
    got = attention_got(model, token_ids, recitals(token_ids, tokenizer))
    outputs = got.largest.double().clamp_min(_LEAST_GOT).log()
    for place, layer in enumerate(model.spec.full_layers):
        sums.add(place, got.hidden[layer][NUM_SINKS:], outputs[layer, :, NUM_SINKS:].T)


class _Scores:
    """Watches contexts being read, and notes the scores of their tokens in some layers, but for sinks."""

    def __init__(self, scorer: Scorer, layers: Sequence[int]) -> None:
        self._scorer = scorer
        self._layers = layers
        self._found: list[torch.Tensor] = []

    def enters(self, entering: Entering) -> None:
        if entering.layer not in self._layers:
            return
        self._found.append(self._scorer.scores(entering.layer, entering.hidden)[:, NUM_SINKS:].flatten())

    def attends(self, layer: int, first: int, weights: torch.Tensor) -> None:
        pass

    def quantiles(self) -> torch.Tensor:
        """Return quantiles at equal shares, float32."""
        scores = torch.cat(self._found).sort().values
        places = torch.linspace(0, len(scores) - 1, _NUM_QUANTILES, dtype=torch.float64)
        return scores[places.round().long()].contiguous()
