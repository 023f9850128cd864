"""The timeline counts as a list of all that ever happened does, and forgets what is ten minutes ago."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagefold.observe.timeline import NUM_PIECES, PIECE_S, BlockUse, Timeline

HAPPENINGS = st.lists(
    st.tuples(
        st.floats(0, 400),  # seconds since the one before
        st.sampled_from(("found", "computed", "held")),
        st.integers(1, 9),
    ),
    max_size=60,
)


class Clock:
    now_s = 12_345.6

    def __call__(self) -> float:
        return self.now_s


def piece(at_s: float) -> int:
    return int(at_s // PIECE_S)


@given(HAPPENINGS)
def test_it_is_what_a_list_of_everything_says(happenings: list[tuple[float, str, int]]) -> None:
    clock = Clock()
    timeline = Timeline(clock)
    everything: list[tuple[float, str, int]] = []
    for gap_s, what, num in happenings:
        clock.now_s += gap_s
        everything.append((clock.now_s, what, num))
        if what == "held":
            timeline.sample(BlockUse(num, 0, 0, 0))
        else:
            timeline.count("lookups", what, num)
        last = piece(clock.now_s)
        counts: dict[str, list[int]] = {}
        held: list[int | None] = [None] * NUM_PIECES
        for at_s, label, count in everything:
            place = piece(at_s) - last + NUM_PIECES - 1
            if label == "held":
                held[max(0, place) :] = [count] * (NUM_PIECES - max(0, place))
            elif place >= 0:
                counts.setdefault(label, [0] * NUM_PIECES)[place] += count
        assert timeline.series("lookups") == counts
        assert [None if use is None else use.num_held for use in timeline.uses()] == held
        assert timeline.series("others") == {}
        assert len(timeline._pieces) <= NUM_PIECES


def test_a_rate_is_of_the_last_ten_to_fifteen_seconds() -> None:
    clock = Clock()
    clock.now_s = 100.0
    timeline = Timeline(clock)
    timeline.count("tokens", "output", 1000)
    clock.now_s = 110.0
    timeline.count("tokens", "output", 50)
    clock.now_s = 114.0
    assert timeline.rate("tokens", "output") == 1050 / 14
    clock.now_s = 115.0
    assert timeline.rate("tokens", "output") == 50 / 10
    clock.now_s = 200.0
    assert timeline.rate("tokens", "output") == 0
