"""OverlappedEngine: a step ahead is planned on tokens that nobody knows yet, and nobody can tell.

The runner here computes a step when its result is asked for, by the shadow of a model: what a row reads that it should
not have read shows in its tokens. The plain engine on the same requests is the twin.
"""

from __future__ import annotations

from random import Random

import pytest

from pagefold.engine.engine import Engine
from pagefold.engine.limits import ModelLimits
from pagefold.engine.overlapped import OverlappedEngine
from pagefold.errors import InvalidRequestError
from pagefold.events import StepAbandoned
from pagefold.kv import NO_HOST, HostTier, KVCore, Namespace, audit
from pagefold.memory.capacity import Capacity
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim.shadow_runner import VOCAB_SIZE, ShadowRunner, expected_token

PLAIN = {"temperature": 0.0, "ignore_eos": True}


class LateRunner(ShadowRunner):
    """Computes a launched step when its result is asked for; ``wrong`` says what happens instead, by step id."""

    def __init__(self, scheduler):
        super().__init__(scheduler)
        self.wrong = {}
        self.log = []

    def launch(self, plan):
        self.log.append(("launch", plan.step_id))
        if isinstance(self.wrong.get(("launch", plan.step_id)), BaseException):
            raise self.wrong["launch", plan.step_id]
        return lambda: self._land(plan)

    def _land(self, plan):
        self.log.append(("land", plan.step_id))
        wrong = self.wrong.get(("land", plan.step_id))
        if wrong is not None:
            self.spoil(plan, plan.num_rows)
            raise wrong
        return self.run(plan)


def make(kind=OverlappedEngine, *, num_blocks=64, seqs=8, budget=32, num_held=0, emit=None, **parts):
    told = {"emit": emit} if emit is not None else {}
    core = KVCore(num_blocks, block_size=4, host=HostTier(num_held) if num_held else NO_HOST, **told)
    scheduler = Scheduler(core, SchedulerLimits(seqs, budget), **told)
    return kind(
        scheduler=scheduler,
        runner=LateRunner(scheduler),
        tokenizer=None,
        limits=ModelLimits(VOCAB_SIZE, (), Namespace("m", "l", "d")),
        capacity=Capacity(0, 0, num_blocks, 4, max_model_len=60, num_blocks_per_request=16),
        **told,
        **parts,
    )


def tokens_of(deltas):
    tokens = {}
    for delta in deltas:
        tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    return tokens


def drain(engine):
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        audit(engine.scheduler.core)
    assert engine.scheduler.core.num_active == 0
    assert not engine.has_requests
    return deltas


def test_all_steps_but_the_first_are_launched_before_the_last_one_has_landed():
    engine = make()
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=6, **PLAIN))
    drain(engine)
    assert engine.runner.log[:5] == [("launch", 0), ("launch", 1), ("land", 0), ("launch", 2), ("land", 1)]
    assert (engine.num_launched, engine.num_ahead) == (6, 5), "its end is known in advance: no row too many"


def test_whoever_wants_decisions_in_order_gets_them():
    engine = make()
    engine.decide_in_order()
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=6, **PLAIN))
    drain(engine)
    assert engine.runner.log[:4] == [("launch", 0), ("land", 0), ("launch", 1), ("land", 1)]
    assert engine.num_ahead == 0


def test_a_prompt_without_output_is_computed_chunk_by_chunk_beside_those_that_decode():
    engine = make(budget=8)
    engine.add("decodes", [1, 2, 0], SamplingParams(max_tokens=40, **PLAIN))
    engine.step()
    engine.add("none", [1, 2] * 20, SamplingParams(max_tokens=0, **PLAIN))
    told = [delta.request_id for delta in drain(engine)]
    assert told.index("none") < 10
    assert told.count("decodes") == 40


def requests_of(seed, num_requests=24):
    """Return requests that share prefixes, of all kinds: plain ones mostly."""
    random = Random(seed)
    found = []
    for index in range(num_requests):
        prompt = [1, 2, 0, 1] * random.randint(0, 5) + random.choices(range(VOCAB_SIZE), k=random.randint(1, 6))
        how = dict(PLAIN, max_tokens=random.randint(1, 30))
        match random.randrange(8):
            case 0:
                how |= {"temperature": 1.0, "n": random.randint(2, 3), "seed": index}
            case 1:
                how |= {"stop_token_ids": (random.randrange(VOCAB_SIZE),)}
            case 2:
                how |= {"repetition_penalty": 1.5}  # the shadow does not heed it, and the scheduler does
            case 3:
                how |= {"logit_bias": {0: 1.0}, "min_tokens": 1}
            case 4:
                how |= {"max_tokens": 0}
        found.append((prompt, SamplingParams(**how)))
    return found


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("seed", range(12))
def test_outputs_and_reasons_are_those_of_the_plain_loop(seed):
    found = []
    for kind in (Engine, OverlappedEngine):
        random = Random(seed)
        limits = {"seqs": random.choice((3, 5, 8)), "budget": random.choice((8, 64))}
        engine = make(kind, num_blocks=random.choice((17, 24, 80)), **limits)
        coming = list(enumerate(requests_of(seed)))
        deltas = []
        while coming or engine.has_work:
            for _ in range(random.choice((0, 0, 1, 3))):
                if coming:
                    index, (prompt, how) = coming.pop()
                    engine.add(str(index), prompt, how)
            deltas += engine.step()
            audit(engine.scheduler.core)
        assert engine.scheduler.core.num_active == 0
        ended = {(delta.request_id, delta.index): delta.finish_reason for delta in deltas if delta.finish_reason}
        found.append((tokens_of(deltas), ended))
    assert engine.num_ahead > engine.num_launched / 4
    assert found[0] == found[1]


@pytest.mark.quick(every=10)
@pytest.mark.parametrize("seed", range(20))
def test_whoever_comes_by_a_name_is_told_its_own(seed):  # noqa: C901 - a choice of operations
    """Few names, so that they come again; cancels, resets and failed steps between, where memory is short."""
    random = Random(seed)
    engine = make(num_blocks=random.choice((17, 30)), seqs=3, num_held=random.choice((0, 20)))
    for kind in ("launch", "land"):
        for step_id in random.sample(range(600), 30):
            engine.runner.wrong[kind, step_id] = RuntimeError("it died")
    namespace = Namespace("m", "l", "d").key()
    living, num_ended = {}, 0  # by name: all tokens so far, and how many there will be

    def take(deltas):
        for delta in deltas:
            tokens, num_tokens = living[delta.request_id]
            for token in delta.token_ids:
                assert token == expected_token(namespace, tokens, 0)
                tokens.append(token)
            if delta.is_last:
                assert delta.finish_reason == "error" or len(tokens) == num_tokens
                del living[delta.request_id]
                yield delta

    for _ in range(500):
        match random.randrange(8):
            case 0 | 1 | 2:
                name, num_new = random.choice("abcd"), random.randint(1, 12)
                if name not in living:
                    tokens = [1, 2, 0, 1] * random.randint(0, 4) + random.choices(range(VOCAB_SIZE), k=3)
                    engine.add(name, tokens, SamplingParams(max_tokens=num_new, seed=0, **PLAIN))
                    living[name] = tokens, len(tokens) + num_new
            case 3 if living:
                name = random.choice(sorted(living))
                del living[name]
                assert engine.abort(name)
            case 4 if random.random() < 0.2:
                engine.reset_prefix_cache()
            case _:
                num_ended += len(list(take(engine.step())))
        audit(engine.scheduler.core)
    list(take(drain(engine)))
    assert not living
    assert num_ended > 20
    assert engine.num_ahead > 50


def test_who_ends_by_a_token_is_told_at_once_and_its_id_is_free():
    engine = make()
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=30, stop_token_ids=tuple(range(VOCAB_SIZE)), **PLAIN))
    assert engine.step() == []
    (delta,) = engine.step()
    assert (delta.finish_reason, delta.is_last, len(delta.token_ids)) == ("stop", True, 1)
    assert engine.scheduler.core.num_active > 0, "its row too many is being computed"
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=1, **PLAIN))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add("r", [1, 2, 0], SamplingParams(max_tokens=1, **PLAIN))
    assert len(tokens_of(drain(engine))["r", 0]) == 1


def test_who_takes_the_name_of_a_cancelled_request_gets_nothing_of_it():
    """What had landed and was not told is of nobody, whether a reset or somebody else's name made it land."""
    engine = make()
    for name in ("r", "s"):
        engine.add(name, [1, 2, 0], SamplingParams(max_tokens=30, **PLAIN))
    engine.step()
    engine.step()
    engine.reset_prefix_cache()
    for name in ("r", "s"):
        assert engine.abort(name)
        engine.add(name, [2, 2, 1, 0], SamplingParams(max_tokens=4, seed=0, **PLAIN))
    plain = make(Engine)
    plain.add("r", [2, 2, 1, 0], SamplingParams(max_tokens=4, seed=0, **PLAIN))
    expected = tokens_of(drain(plain))["r", 0]
    assert tokens_of(drain(engine)) == {("r", 0): expected, ("s", 0): expected}


def test_who_takes_the_name_of_a_request_that_failed_and_was_cancelled_is_not_told_its_error():
    engine = make()
    engine.runner.wrong = {("land", step_id): RuntimeError("it died") for step_id in (0, 2, 3)}
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=6, **PLAIN))
    for _ in range(3):
        assert engine.step() == []
    engine.reset_prefix_cache()
    assert not engine.has_requests, "its third step has failed, and nobody knows yet"
    assert engine.abort("r")
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=6, **PLAIN))
    assert len(tokens_of(drain(engine))["r", 0]) == 6


def test_who_takes_a_name_while_a_row_too_many_fails_is_not_told_of_that():
    engine = make()
    engine.runner.wrong = {("land", 1): RuntimeError("it died")}
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=30, stop_token_ids=tuple(range(VOCAB_SIZE)), **PLAIN))
    engine.step()
    (delta,) = engine.step()
    assert delta.finish_reason == "stop"
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=6, **PLAIN))
    deltas = drain(engine)
    assert len(tokens_of(deltas)["r", 0]) == 6
    assert [delta.finish_reason for delta in deltas if delta.is_last] == ["length"]


def test_who_is_cancelled_while_it_is_computed_leaves_no_block():
    engine = make()
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=30, **PLAIN))
    engine.add("other", [2, 2, 0], SamplingParams(max_tokens=8, **PLAIN))
    for _ in range(3):
        engine.step()
    assert engine.abort("r")
    tokens = tokens_of(drain(engine))
    assert set(tokens) == {("other", 0)}


def test_a_step_that_cannot_be_launched_ahead_fails_in_its_turn():
    events = []
    engine = make(emit=events.append)
    engine.runner.wrong = {("launch", 2): MemoryError("no room")}
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=6, **PLAIN))
    assert len(tokens_of(drain(engine))["r", 0]) == 6
    assert [event.step_id for event in events if isinstance(event, StepAbandoned)] == [2]


def test_a_request_whose_steps_cannot_be_launched_gets_its_tokens_and_then_the_error():
    engine = make()
    engine.runner.wrong = {("launch", step_id): MemoryError("no room") for step_id in range(3, 9)}
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=6, **PLAIN))
    deltas = drain(engine)
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1, 0]
    assert deltas[-1].finish_reason == "error"
    assert "no room" in deltas[-1].error


def test_a_step_that_fails_takes_the_one_behind_it_back_once_that_has_ended():
    events = []
    engine = make(emit=events.append)
    engine.runner.wrong = {("land", 2): RuntimeError("it died")}
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=6, **PLAIN))
    assert len(tokens_of(drain(engine))["r", 0]) == 6
    abandoned = [(event.step_id, event.error) for event in events if isinstance(event, StepAbandoned)]
    assert abandoned == [(2, "RuntimeError: it died"), (3, "the step before it failed")]
    at = engine.runner.log.index(("land", 2))
    assert engine.runner.log[at - 1 : at + 3] == [("launch", 3), ("land", 2), ("land", 3), ("launch", 4)]


@pytest.mark.parametrize("when", [("land", 2), ("launch", 3)])
def test_whoever_interrupts_finds_no_step_in_flight(when):
    engine = make()
    engine.runner.wrong = {when: KeyboardInterrupt()}
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=6, **PLAIN))
    deltas = [*engine.step(), *engine.step(), *engine.step()]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    audit(engine.scheduler.core)
    deltas += drain(engine)
    plain = make(Engine)
    plain.add("r", [1, 2, 0], SamplingParams(max_tokens=6, **PLAIN))
    assert tokens_of(deltas) == tokens_of(drain(plain))


def test_a_reset_lands_what_is_in_flight():
    engine = make()
    engine.add("r", [1, 2, 0, 1, 1], SamplingParams(max_tokens=20, **PLAIN))
    engine.step()
    engine.step()
    engine.reset_prefix_cache()
    assert engine.runner.log[-1] == ("land", 1)
    assert len(tokens_of(drain(engine))["r", 0]) == 20 - 1, "one was told before"


def test_blocks_that_fill_with_tokens_nobody_knew_are_found_later():
    engine = make()
    engine.add("r", [1, 2, 0], SamplingParams(max_tokens=21, **PLAIN))
    output = tokens_of(drain(engine))["r", 0]
    assert engine.num_ahead == 20
    engine.add("again", [1, 2, 0, *output], SamplingParams(max_tokens=1, **PLAIN))
    (delta,) = drain(engine)
    assert delta.num_cached_tokens == 20


def test_a_block_that_others_were_writing_too_is_published_though_their_step_fails():
    """The second comes while the first fills the block that it would find; the first ends with the step that fails."""
    prompt, how = [1, 2, 0], dict(PLAIN, seed=0)
    plain = make(Engine)
    plain.add("r", prompt, SamplingParams(max_tokens=2, **how))
    first, last = tokens_of(drain(plain))["r", 0]
    assert first != last
    engine = make()
    engine.runner.wrong = {("land", 2): RuntimeError("it died")}
    engine.add("first", prompt, SamplingParams(max_tokens=9, stop_token_ids=(last,), **how))
    deltas = [*engine.step(), *engine.step()]
    engine.add("second", [*prompt, first, 1], SamplingParams(max_tokens=1, **how))
    deltas += drain(engine)
    assert tokens_of(deltas)["first", 0] == [first, last]
    assert [delta.num_cached_tokens for delta in deltas if delta.request_id == "second"] == [4]


def test_a_burst_of_equal_prompts_computes_its_prefix_once_in_steps_ahead_too():
    engine = make(budget=8, num_blocks=200)
    prompt = [1, 2, 0, 1] * 8
    for index in range(6):
        engine.add(str(index), [*prompt, index % VOCAB_SIZE], SamplingParams(max_tokens=4, **PLAIN))
    deltas = drain(engine)
    cached = {delta.request_id: delta.num_cached_tokens for delta in deltas}
    assert [cached[str(index)] for index in range(6)] == [0, 32, 32, 32, 32, 32]
    assert engine.num_ahead > engine.num_launched / 2
