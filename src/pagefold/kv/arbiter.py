"""Arbiter: load a block from a slow tier, or compute it? Whichever is sooner, by what was measured.

Each tier has a model of two numbers, a latency and a bandwidth; computing has one, seconds a token. All three follow
what happens. What is loaded is counted in blocks, and what need not be computed for it in *places* of a path, each of
``block_size`` tokens: where there are several cache groups, a place has several blocks. Attention makes later tokens of
a prompt dearer than this says, so what it gives to computing is never too little by much.

A step that restores blocks from the host's own memory waits for nobody, but it computes that much later: where that is
measured, as on a card, restoring is weighed too (:meth:`Arbiter.restores`).

Waiting has a bound: a request for which nothing arrives for a while (a share of what computing would have taken) goes
on with what it has. So a tier that stalls without warning costs that share and no more, and one that drips is left as
soon as computing would be sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Arbiter", "LinkModel", "Verdict"]

_WEIGHT = 0.2
"""The weight of the newest measurement in each average."""

_RECOVERY = 0.01
"""How much a tier that is left out is forgiven with each request that could have used it."""

_HOPE = 1.25
"""A tier that was measured as too slow at the start is in time thought this much faster than it must be to be tried."""

_PATIENCE = 0.15
"""Share of the time that computing would take, for which a request waits though nothing arrives."""

_MIN_LEARNT_TOKENS, _MIN_LEARNT_A_ROW = 64, 8
"""A step that computes fewer tokens, or fewer for each of its sequences, says little of what prefilling takes."""

_INSTANT_S = 1e-12

_COPY_SHARE = 0.01
"""What restoring takes where the host's memory is the device's: a copy, of some hundredth of what computing takes."""

_MARGIN = 0.8
"""Loading must take at most this share of computing: measurements err, and a hit is not to be slower than a miss."""


class LinkModel:
    """How fast a tier delivers: ``latency_s + num_bytes / bytes_per_s``.

    Args:
        latency_s: seconds until the first byte.
        bytes_per_s: from then on.
    """

    __slots__ = ("_first_bytes_per_s", "bytes_per_s", "latency_s")

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = self._first_bytes_per_s = bytes_per_s

    def seconds(self, num_bytes: int) -> float:
        """Return how long ``num_bytes`` take."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def learn(self, num_bytes: int, seconds: float) -> None:
        """Take note that ``num_bytes`` took ``seconds``, the tier doing nothing else."""
        if num_bytes and seconds > 0:
            self.latency_s = min(self.latency_s, seconds / 2)
            self.bytes_per_s += _WEIGHT * (num_bytes / (seconds - self.latency_s) - self.bytes_per_s)

    def recover(self, hoped_bytes_per_s: float = 0.0) -> None:
        """Note that a tier was not used, since it is thought too slow: in time it is thought faster, and tried again.

        Args:
            hoped_bytes_per_s: what it is thought then, where that is more than at first.
        """
        hoped = max(self._first_bytes_per_s, hoped_bytes_per_s)
        self.bytes_per_s += _RECOVERY * max(0.0, hoped - self.bytes_per_s)


class Verdict(NamedTuple):
    """What to do about blocks that slow tiers hold.

    Attributes:
        num_blocks: load the first so many, and compute the rest.
        load_s: how long that should take.
        compute_s: how long computing what they save would take.
        patience_s: how long to wait though nothing arrives.
    """

    num_blocks: int
    load_s: float
    compute_s: float
    patience_s: float


class Arbiter:
    """Weighs loading against computing.

    Args:
        block_bytes: bytes of a block.
        block_size: tokens a block.
        compute_s_per_token: what prefilling takes, as far as known.
        blocks_per_place: blocks that a place of a long path takes: as many as there are groups that keep all, since
            windows do not grow with it.

    Attributes:
        block_bytes, block_size: as given.
        place_bytes: bytes that a place of a long path takes.
        links: of each tier.
        compute_s_per_token: what prefilling takes.
        num_unrestored: requests that were left to compute what the host holds.
        num_loaded, num_refused, num_late: requests for which it chose to load, to compute, and which it let go on
            without all that they waited for.
        regret_s: seconds that requests lost by waiting, against computing.
        gain_s: seconds that they won.
    """

    def __init__(
        self, block_bytes: int, block_size: int, *, compute_s_per_token: float, blocks_per_place: int = 1
    ) -> None:
        self.block_bytes = block_bytes
        self.place_bytes = blocks_per_place * block_bytes
        self.block_size = block_size
        self.compute_s_per_token = compute_s_per_token
        self.links: dict[str, LinkModel] = {}
        self.num_loaded = self.num_refused = self.num_late = self.num_unrestored = 0
        self.regret_s = self.gain_s = 0.0

    def compute_s(self, num_places: int) -> float:
        """Return how long computing so many places of a path takes."""
        return num_places * self.block_size * self.compute_s_per_token

    @property
    def least_bytes_per_s(self) -> float:
        """What a tier must deliver to bring a place of a long path sooner than the place is computed."""
        return self.place_bytes / max(_MARGIN * self.compute_s(1), _INSTANT_S)

    def is_fast(self, tier: str) -> bool:
        """Whether a tier is thought to bring a place of a long path sooner than the place is computed."""
        return self.links[tier].bytes_per_s > self.least_bytes_per_s

    def pays(self, tier: str) -> bool:
        """Whether a request should look into a tier. One that is too slow is forgiven a little, and tried in time.

        That holds also for one that was too slow when it was measured first: the machine may have been busy.
        """
        if self.is_fast(tier):
            return True
        self.links[tier].recover(_HOPE * self.least_bytes_per_s)
        return False

    def weigh(
        self, tiers: list[str], queued_bytes: dict[str, int], gain: Callable[[int], int], *, is_first: bool = True
    ) -> Verdict:
        """Decide about blocks of one path.

        Args:
            tiers: of each block the tier that holds it, from the path's first missing block on.
            queued_bytes: what each tier has to deliver before.
            gain: of how many of the first blocks how many places need not be computed (:meth:`Missing.gain`).
            is_first: whether the request is counted: it was not weighed before.
        """
        best = Verdict(0, 0.0, 0.0, 0.0)
        best_s = 0.0
        load_s: dict[str, float] = {}
        for num_blocks, tier in enumerate(tiers, 1):
            link = self.links[tier]
            if tier not in load_s:
                load_s[tier] = link.seconds(queued_bytes.get(tier, 0))
            load_s[tier] += self.block_bytes / link.bytes_per_s
            compute_s = self.compute_s(gain(num_blocks))
            slowest_s = max(load_s.values())  # tiers deliver beside each other
            won_s = _MARGIN * compute_s - slowest_s
            if won_s > best_s:
                waits_s = max(self.links[one].seconds(queued_bytes.get(one, 0)) for one in load_s)
                best_s = won_s
                best = Verdict(num_blocks, slowest_s, compute_s, max(_PATIENCE * compute_s, 2 * waits_s))
        if best.num_blocks:
            best = best._replace(patience_s=min(best.patience_s, best.compute_s))
            self.num_loaded += is_first
        else:
            self.num_refused += is_first
            for tier in load_s:
                self.links[tier].recover()
        return best

    def restores(self, tier: str, num_blocks: int, num_places: int) -> bool:
        """Decide whether a step loads so many blocks that ``tier`` has at hand, or computes ``num_places`` instead.

        True where the tier's link is not known. A tier that is left out is forgiven a little, and tried again in time.
        """
        link = self.links.get(tier)
        if link is None or link.seconds(num_blocks * self.block_bytes) < _MARGIN * self.compute_s(num_places):
            return True
        self.num_unrestored += 1
        link.recover()
        return False

    def restore_share(self, tier: str) -> float:
        """Return what restoring a place of a path from ``tier`` takes, as a share of computing it; at most 1.

        Some hundredth where the tier's link is not known.
        """
        link = self.links.get(tier)
        if link is None:
            return _COPY_SHARE
        return min(1.0, self.place_bytes / link.bytes_per_s / max(self.compute_s(1), _INSTANT_S))

    def goes_on(self, num_arrived: int, num_left: int, waited_s: float, num_places: int) -> bool:
        """Whether a request should wait for ``num_left`` blocks, since so many arrived in ``waited_s``.

        Args:
            num_arrived: blocks.
            num_left: blocks that are to come yet.
            waited_s: since it began.
            num_places: that it must compute if it does not wait.
        """
        if not num_arrived:
            return True  # its patience bounds that
        return num_left * waited_s / num_arrived < self.compute_s(num_places)

    def learn_compute(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Take note that a step computed ``num_tokens`` of ``num_rows`` sequences in ``seconds``.

        Nothing is learnt of one that was not mostly prefilling.
        """
        if num_tokens >= max(_MIN_LEARNT_TOKENS, _MIN_LEARNT_A_ROW * num_rows):
            self.compute_s_per_token += _WEIGHT * (seconds / num_tokens - self.compute_s_per_token)

    def account(self, num_places: int, waited_s: float) -> None:
        """Take note that a request waited ``waited_s``, and then had ``num_places`` that it need not compute."""
        gain = self.compute_s(num_places) - waited_s
        if gain >= 0:
            self.gain_s += gain
        else:
            self.regret_s -= gain
