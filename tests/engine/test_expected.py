"""Conversations that are expected: their blocks come from slow tiers before they do, and they are told the same."""

from __future__ import annotations

import time

import pytest
from engine.test_tiering import GREEDY, TieredLLM, prompts

from pagefold.errors import InvalidRequestError
from pagefold.kv import audit
from pagefold.request import MAX_RETURNS_IN_S, Caller

SOON = 1000.0


def ask(llm, request_id, tokens, caller):
    """Run one request; return its tokens, and how many came from which tier."""
    engine = llm.engine
    engine.add(request_id, tokens, GREEDY, caller)
    request = engine.scheduler.get(request_id)
    is_held = bool(engine.scheduler.fetching)
    while engine.has_requests:
        if not engine.has_work:
            engine.wait()
        engine.step()
    return request.output_token_ids, request.num_loaded_tokens, is_held


def settle(llm, now):
    """Let all that is due be brought, and written."""
    tiering = llm.engine.tiering
    for _ in range(200):
        tiering.poll(now)
        if (
            llm.engine.scheduler.core.slow.is_quiet
            and not tiering._fetching._wanted
            and tiering._returning.next_due_s() > now
        ):
            return
        tiering.wait(0.05)
    pytest.fail("transfers did not come to an end")


def only_in_the_store(llm, tokens):
    """Let others push what is cached of a prompt off the device and the host's memory."""
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    for index, other in enumerate(prompts(60)[1:]):
        ask(llm, f"other{index}", other["prompt_token_ids"], Caller())
        settle(llm, time.monotonic())
        if len(llm.engine.scheduler.core.missing(llm.engine.limits.namespace.key(), packed, 99).names) == 6:
            return
    pytest.fail("some of it is still here")


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(("tier", "returns_in_s"), [("disk", SOON), ("disk", None), ("remote", SOON)])
def test_blocks_come_before_they_are_asked_for(tiny_chat_model, tier, returns_in_s):
    llm = TieredLLM(str(tiny_chat_model), policy="write_through", tier=tier)
    (tokens,) = (prompt["prompt_token_ids"] for prompt in prompts(1))
    output, _, _ = ask(llm, "first", tokens, Caller(returns_in_s=returns_in_s))
    only_in_the_store(llm, tokens)
    core, tiering = llm.engine.scheduler.core, llm.engine.tiering
    num_read = core.slow.fetches.num_fetched
    settle(llm, time.monotonic() + SOON)
    audit(core)
    assert core.slow.fetches.num_fetched - num_read == (0 if returns_in_s is None else 6)
    assert not tiering._fetching._wanted
    output_again, loaded, is_held = ask(llm, "again", tokens, Caller())
    assert output_again == output
    assert loaded == {tier: 96}
    assert is_held == (returns_in_s is None)
    audit(core)


def test_what_is_still_here_is_not_brought(tiny_chat_model):
    llm = TieredLLM(str(tiny_chat_model), policy="write_through")
    ask(llm, "first", prompts(1)[0]["prompt_token_ids"], Caller(returns_in_s=0.0))
    settle(llm, time.monotonic())
    assert not llm.engine.scheduler.core.slow.fetches.num_fetched


def test_a_tier_that_fails_is_no_harm(tiny_chat_model):
    llm = TieredLLM(str(tiny_chat_model), policy="write_through", fault_rate=0.5, seed=3)
    outputs = [ask(llm, f"a{i}", p["prompt_token_ids"], Caller(returns_in_s=SOON))[0] for i, p in enumerate(prompts())]
    settle(llm, time.monotonic())
    for turn in range(3):
        settle(llm, time.monotonic() + SOON)
        audit(llm.engine.scheduler.core)
        for i, prompt in enumerate(prompts()):
            caller = Caller(returns_in_s=SOON)
            assert ask(llm, f"b{turn}{i}", prompt["prompt_token_ids"], caller)[0] == outputs[i]
    assert llm.store.num_faults
    llm.close()
    audit(llm.engine.scheduler.core)


def test_a_reset_forgets_who_is_expected(tiny_chat_model):
    llm = TieredLLM(str(tiny_chat_model), policy="write_through")
    ask(llm, "first", prompts(1)[0]["prompt_token_ids"], Caller(returns_in_s=SOON))
    llm.engine.reset_prefix_cache()
    assert llm.engine.tiering.next_due_s() == float("inf")


@pytest.mark.parametrize("returns_in_s", [-0.1, MAX_RETURNS_IN_S + 1, float("nan"), float("inf")])
def test_nobody_returns_before_or_after_the_end_of_days(returns_in_s):
    with pytest.raises(InvalidRequestError, match="returns_in_s"):
        Caller(returns_in_s=returns_in_s)
