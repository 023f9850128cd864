"""Which outputs are whole: all that learns from outputs, or keeps what they have, takes them alike.

A replay ends by a token what a grammar had ended: it does not know the grammar.
"""

from __future__ import annotations

import pytest

from pagefold.kv import KVCore, PinLimits
from pagefold.request import HintPin, Request, StopRule, session_ref
from pagefold.sampling import SamplingParams
from pagefold.scheduler import SCHEDULING_POLICIES, Scheduler, SchedulerLimits
from pagefold.sim import NullRunner, hashed_token

NUM_TOKENS = 3


class DeadEnd:
    """A grammar that finds no way on behind so many tokens."""

    is_complete = False
    field = "grammar"
    error: str | None = None

    def __init__(self) -> None:
        self.num_tokens = 0

    def accept(self, token_id: int) -> None:
        self.num_tokens += 1
        if self.num_tokens == NUM_TOKENS:
            self.error = "nothing may come here"


def told_of(how: str) -> dict[str, object]:
    """Serve a request that ends as told; return what is known and kept of it."""
    core = KVCore(64, block_size=4, pin_limits=PinLimits(max_share=0.5))
    policy = SCHEDULING_POLICIES["fair"](1.0)
    scheduler = Scheduler(core, SchedulerLimits(4, 64), policy=policy, admission="predicted")
    stops = frozenset({hashed_token(0, NUM_TOKENS - 1)} if how == "token" else ())
    request = Request(
        "r",
        range(8),
        SamplingParams(temperature=0.0),
        stop=StopRule(stops, 8 + (NUM_TOKENS if how == "length" else 20)),
        matcher=DeadEnd() if how == "grammar" else None,
        session=session_ref("t", "s"),
        tenant="t",
        returns_in_s=7.0,
        hint_pins=(HintPin(4, 60.0),),
    )
    scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        if how == "fault" and request.num_output_tokens == NUM_TOKENS:
            scheduler.abandon("no memory")
            continue
        scheduler.apply(NullRunner().run(plan))
        if how in {"text", "abort"} and request.num_output_tokens == NUM_TOKENS:
            scheduler.finish("r", "stop" if how == "text" else "abort")
    assert request.num_output_tokens == NUM_TOKENS
    (known,) = scheduler.sessions._tenants.values()
    (session,) = known.sessions.values()
    (path,) = session.paths
    tenant = scheduler.rule._forecaster._tenants.get("t")
    return {
        "reason": request.finish_reason,
        "pins": [pin.num_blocks for pin in core.pins],
        "mean output": policy.tenants["t"].mean_output,
        "lengths": 0 if tenant is None else len(tenant.all_lengths),
        "due": (path.tail is not None, path.due_s),
    }


@pytest.mark.parametrize("how", ["grammar", "text"])
def test_what_ended_by_its_grammar_or_text_is_as_whole_as_what_a_token_ended(how):
    by_token = told_of("token")
    learned = (by_token["pins"], by_token["mean output"], by_token["lengths"])
    assert learned == ([1], 3.0, 1)
    assert told_of(how) == by_token | {"reason": "error" if how == "grammar" else "stop"}


def test_an_output_as_long_as_it_may_be_is_an_answer():
    assert told_of("length") == told_of("token") | {"reason": "length"}


def test_an_output_that_somebody_cut_off_is_none():
    cut, by_token = told_of("abort"), told_of("token")
    assert cut["mean output"] == 0.0
    assert cut["due"] != by_token["due"], "what it said of its return does not count"


def test_nothing_is_learned_of_a_fault():
    failed = told_of("fault")
    assert failed["reason"] == "error"
    assert (failed["pins"], failed["mean output"], failed["lengths"]) == ([], 0.0, 0)
