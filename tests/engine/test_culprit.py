"""A runner that fails for a token, in a real engine: who has the token ends, and 127 others can not tell."""

from __future__ import annotations

import pytest

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.events import StepAbandoned
from pagefold.kv import audit
from pagefold.sampling import SamplingParams

POISON = 777
NUM_REQUESTS = 128


class FailingRunner:
    """The real runner, which dies of every step that computes the token, or of every step."""

    def __init__(self, inner):
        self.inner = inner
        self.is_dead = False

    def run(self, plan):
        if self.is_dead or POISON in plan.token_ids:
            msg = "the device did not like that"
            raise RuntimeError(msg)
        return self.inner.run(plan)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.fixture(scope="module")
def engine(tiny_chat_model):
    config = EngineConfig(
        model=str(tiny_chat_model),
        kv_cache_memory_bytes=2**22,
        max_model_len=64,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=1024,
    )
    events = []
    engine = build_engine(plan_engine(config), emit=events.append)
    engine.runner = FailingRunner(engine.runner)
    engine.seen = events
    return engine


def drain(engine):
    """Run to the end; return the tokens of each request, why it ended, and what it was told."""
    tokens, ends = {}, {}
    while engine.has_work:
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                ends[delta.request_id] = (delta.finish_reason, delta.error)
    audit(engine.scheduler.core)
    assert engine.scheduler.core.num_active == 0
    return tokens, ends


def add_all(engine, *, with_poison=None):
    how = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 6}
    for index in range(NUM_REQUESTS - 1):
        engine.add(f"r{index}", [5, 6, 7, 1000 + index], SamplingParams(**how))
    if with_poison == "prompt":
        engine.add("bad", [5, 6, POISON], SamplingParams(**how))
    elif with_poison == "sampled":
        engine.add("bad", [5, 6], SamplingParams(**how, logit_bias={POISON: 100.0}))


@pytest.mark.parametrize("where", ["prompt", "sampled"])
def test_nobody_of_127_ends_because_of_one(engine, where, caplog):
    add_all(engine)
    expected, _ = drain(engine)
    engine.seen.clear()
    add_all(engine, with_poison=where)
    tokens, ends = drain(engine)
    reason, error = ends.pop("bad")
    assert reason == "error"
    assert error.startswith("3 steps failed with this request alone in them: RuntimeError: the device")
    assert len(tokens.pop("bad", [])) == (where == "sampled")
    assert tokens == expected
    assert {reason for reason, _ in ends.values()} == {"length"}
    assert sum(isinstance(event, StepAbandoned) for event in engine.seen) <= 16


def test_a_dead_device_ends_all_after_16_steps(engine, caplog):
    add_all(engine)
    engine.seen.clear()
    engine.step()
    engine.runner.is_dead = True
    _, ends = drain(engine)
    engine.runner.is_dead = False
    assert len(ends) == NUM_REQUESTS - 1
    told = "16 steps in a row failed, whoever was in them: RuntimeError"
    assert all(reason == "error" and error.startswith(told) for reason, error in ends.values())
    assert sum(isinstance(event, StepAbandoned) for event in engine.seen) == 16
    add_all(engine)
    assert {reason for reason, _ in drain(engine)[1].values()} == {"length"}
