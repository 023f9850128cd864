"""Masks in the engine: every token is what transformers' logits, masked by a twin, say.

Of structured output, of tokens that alone are allowed, of bad words, and of all of these together.

The weights are random, so that an output that is valid is so by its grammar. Free requests run in the same batches and
must not notice. All grammars are such that their longest output fits into ``max_tokens``: every output ends.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from jsonschema import Draft202012Validator

from equivalence.harsh_runner import HarshRunner
from equivalence.overlapped_loop import overlapped
from pagefold import SamplingParams, StructuredOutputsParams
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.errors import InvalidRequestError
from pagefold.events import RequestPreempted, StepAbandoned, fan_out, ignore
from pagefold.kv import audit
from pagefold.runner.sampler import sample

MAX_TOKENS = 110
EOS = 2
NEVER = float("-inf")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "langue": {"enum": ["français", "日本語", None]},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["name", "langue", "scores"],
    "additionalProperties": False,
}
WISHES = [
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": r"[a-zé世]{1,20}!"},
    {"choice": ["yes", "yes, please", "no"]},
    {"grammar": 'start: ("(" /[0-9]/ ")")~1..9'},
]
HOWS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 40, "logit_bias": {5: 3.0, 300: -50.0, 92: 20.0}, "logprobs": 2},
    {"temperature": 1.0, "min_p": 0.02, "frequency_penalty": 0.8, "min_tokens": 4},
    # Every byte is allowed, so that every grammar finds a way.
    {"temperature": 1.0, "allowed_token_ids": [token for token in range(49152) if token < 300 or token % 3]},
    {"temperature": 1.0, "bad_words": ["on the", "(1"], "min_tokens": 6, "logit_bias": {2: 19.0, 260: 20.0, 335: 20.0}},
]


def requests_of(tokenizer):
    """Return (prompt, params): every second one is free."""
    made = []
    for at in range(28):
        prompt = tokenizer.encode("Once upon a time there was " + "a very small engine " * (at % 5) + str(at))
        wish = StructuredOutputsParams(**WISHES[at // 2 % len(WISHES)]) if at % 2 else None
        fields = {"seed": at, "max_tokens": MAX_TOKENS if at % 2 else 40, **HOWS[at % len(HOWS)]}
        made.append((prompt, SamplingParams(structured_outputs=wish, **fields)))
    return made


class Run:
    """All requests through an engine of its own."""

    def __init__(self, folder, *, is_harsh=False, is_overlapped=False, emit=ignore):
        self.events = []
        emit = fan_out(self.events.append, emit)
        config = EngineConfig(
            model=str(folder),
            dtype="float64",
            attention_backend="reference",
            max_model_len=176,
            max_num_seqs=8,
            max_num_batched_tokens=32 if is_harsh else 512,
            kv_cache_memory_bytes=2 ** (17 if is_harsh else 24),
            admission="prompt",  # so that requests are preempted
        )
        self.engine = build_engine(plan_engine(config), emit=emit)
        if is_overlapped:
            compiler = self.engine._compiler
            self.engine = overlapped(self.engine, emit)
            self.engine._compiler = compiler
        if is_harsh:
            self.engine.runner = HarshRunner(self.engine, failure_rate=0.15, random=Random(0))
        self.tokens, self.texts, self.reasons, self.errors = {}, {}, {}, {}
        self.logprobs = {}

    def run(self, requests):
        for at, (prompt, how) in enumerate(requests):
            wish = how.structured_outputs
            grammar = None if wish is None else self.engine.compile_grammar(wish)
            self.engine.add(str(at), prompt, how, grammar=grammar)
        while self.engine.has_work:
            for delta in self.engine.step():
                at = int(delta.request_id)
                self.tokens.setdefault(at, []).extend(delta.token_ids)
                self.texts[at] = self.texts.get(at, "") + delta.text
                self.reasons[at] = delta.finish_reason
                self.errors[at] = delta.error
                self.logprobs.setdefault(at, []).extend(delta.logprobs or ())
        audit(self.engine.scheduler.core)
        assert not self.engine.scheduler.core.num_active
        return self

    def count(self, kind):
        return sum(isinstance(event, kind) for event in self.events)


@pytest.fixture(scope="module")
def logits_of(tiny_chat_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_chat_model, dtype=torch.float64).eval()

    @cache
    def logits(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0, -1].tolist()

    return logits


@pytest.fixture(scope="module")
def calm(tiny_chat_model):
    run = Run(tiny_chat_model, is_harsh=False)
    return run.run(requests_of(run.engine.tokenizer))


def forbidden(how, tokenizer, output):
    """Return the tokens that neither ``allowed_token_ids`` nor ``bad_words`` leave: word by word, space by space."""
    banned = set() if how.allowed_token_ids is None else set(range(49152)) - set(how.allowed_token_ids)
    for word in how.bad_words:
        for text in (word, f" {word}"):
            *before, last = tokenizer.encode_parts([text])[0]
            if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                banned.add(last)
    return banned


def expected_token(logits, how, grammar, prompt, output, *, never):
    """Return what must follow ``output``: lists of floats, and a matcher that begins from the beginning every time."""
    logits = list(logits)
    for token_id, bias in (how.logit_bias or {}).items():
        logits[token_id] += bias
    for token_id in set(prompt + output):
        value = logits[token_id]
        logits[token_id] = value / how.repetition_penalty if value > 0 else value * how.repetition_penalty
    for token_id in set(output):
        logits[token_id] -= how.frequency_penalty * output.count(token_id)
    for token_id in never:
        logits[token_id] = NEVER
    banned = {EOS} if len(output) < how.min_tokens else set()
    if grammar is not None:
        matcher = grammar.matcher()
        for token_id in output:
            matcher.accept(token_id)
        mask = matcher.mask()
        allowed = [token_id for token_id in range(len(logits)) if mask[token_id // 8] >> token_id % 8 & 1]
        allowed = [token_id for token_id in allowed if token_id not in never]
        kept = [NEVER] * len(logits)
        for token_id in [token_id for token_id in allowed if token_id not in banned] or allowed:
            kept[token_id] = logits[token_id]
        logits = kept
    else:
        for token_id in banned:
            logits[token_id] = NEVER
    return sample(torch.tensor([logits], dtype=torch.float64), [how], [how.seed], [len(output)])[0]


@pytest.mark.long
def test_every_token_is_that_of_the_masked_distribution(calm, logits_of):
    for at, (prompt, how) in enumerate(requests_of(calm.engine.tokenizer)):
        wish, output = how.structured_outputs, calm.tokens[at]
        grammar = None if wish is None else calm.engine.compile_grammar(wish)
        for place, token_id in enumerate(output):
            logits = logits_of(tuple(prompt + output[:place]))
            never = forbidden(how, calm.engine.tokenizer, output[:place])
            expected = expected_token(logits, how, grammar, prompt, output[:place], never=never)
            assert token_id == expected, (at, place)


def test_some_outputs_are_what_they_are_because_of_a_restriction(calm, logits_of):
    """Without that the test above would tell nothing of restrictions: some likeliest tokens were forbidden ones."""
    kinds = set()
    for at, (prompt, how) in enumerate(requests_of(calm.engine.tokenizer)):
        for place in range(len(calm.tokens[at]) if how.restricts_tokens else 0):
            logits = list(logits_of(tuple(prompt + calm.tokens[at][:place])))
            for token_id, bias in (how.logit_bias or {}).items():
                logits[token_id] += bias
            if logits.index(max(logits)) in forbidden(how, calm.engine.tokenizer, calm.tokens[at][:place]):
                kinds.add((how.allowed_token_ids is not None, len(how.bad_words), how.structured_outputs is not None))
    assert kinds >= {(True, 0, False), (True, 0, True), (False, 2, False)}


@pytest.mark.long
def test_steps_planned_ahead_change_nothing(calm, tiny_chat_model):
    ahead = Run(tiny_chat_model, is_overlapped=True)
    ahead.run(requests_of(ahead.engine.tokenizer))
    assert ahead.tokens == calm.tokens
    assert ahead.texts == calm.texts
    assert ahead.reasons == calm.reasons


@pytest.mark.long
def test_preemption_and_failed_steps_change_nothing(calm, tiny_chat_model):
    harsh = Run(tiny_chat_model, is_harsh=True)
    harsh.run(requests_of(harsh.engine.tokenizer))
    assert harsh.count(RequestPreempted) >= 3
    assert harsh.count(StepAbandoned) >= 10
    assert harsh.tokens == calm.tokens
    assert harsh.texts == calm.texts
    assert harsh.reasons == calm.reasons


def test_free_requests_do_not_notice(calm, tiny_chat_model):
    alone = Run(tiny_chat_model, is_harsh=False)
    requests = requests_of(alone.engine.tokenizer)
    free = [at for at, (_, how) in enumerate(requests) if how.structured_outputs is None and not how.restricts_tokens]
    alone.run([requests[at] for at in free])
    assert [alone.tokens[place] for place in range(len(free))] == [calm.tokens[at] for at in free]


def test_every_output_ends_and_is_valid(calm):
    for at, (_, how) in enumerate(requests_of(calm.engine.tokenizer)):
        wish, text = how.structured_outputs, calm.texts[at]
        if wish is None:
            continue
        assert calm.reasons[at] == "stop", (at, text)
        if wish.json is not None:
            Draft202012Validator(PERSON).validate(json.loads(text))
        elif wish.regex is not None:
            assert re.fullmatch(wish.regex, text)
        elif wish.choice is not None:
            assert text in wish.choice
        else:
            assert re.fullmatch(r"(\(\d\)){1,9}", text)


@pytest.fixture(scope="module")
def llm(tiny_chat_model):
    from pagefold import LLM

    return LLM(str(tiny_chat_model), kv_cache_memory_bytes=2**20, max_model_len=128, max_num_seqs=8)


def complete(llm, wish, **fields):
    how = SamplingParams(
        **{"temperature": 1.0, "max_tokens": 60} | fields, structured_outputs=StructuredOutputsParams(**wish)
    )
    (result,) = llm.generate("Say", how, use_tqdm=False)
    return result.outputs[0]


def test_samples_of_a_restricted_prompt_are_those_of_requests_alone(llm):
    few = tuple(llm.engine.tokenizer.encode(" yes no on the cat"))
    fields = {"temperature": 1.0, "max_tokens": 20, "allowed_token_ids": few, "bad_words": ("yes no", "on the")}
    (result,) = llm.generate("Say", SamplingParams(n=3, seed=7, **fields), use_tqdm=False)
    alone = [
        llm.generate("Say", SamplingParams(seed=7 + index, **fields), use_tqdm=False)[0].outputs[0]
        for index in range(3)
    ]
    assert [output.token_ids for output in result.outputs] == [output.token_ids for output in alone]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    for output in result.outputs:
        assert set(output.token_ids) <= set(few)
        assert "yes no" not in output.text
        assert "on the" not in output.text


def test_a_restriction_that_leaves_no_token_of_a_grammar_ends_its_request_alone(llm):
    (a,) = llm.engine.tokenizer.encode("a")
    wish = StructuredOutputsParams(regex="[ab][ab]b")
    how = SamplingParams(max_tokens=9, allowed_token_ids=[a], structured_outputs=wish)
    free = SamplingParams(max_tokens=9, ignore_eos=True)
    ended, other = llm.generate(["Say"] * 2, [how, free], use_tqdm=False)
    assert (ended.outputs[0].finish_reason, ended.outputs[0].token_ids) == ("error", [a, a])
    assert ended.error == "allowed_token_ids leaves no token that may come next after 2 tokens."
    assert (other.outputs[0].finish_reason, len(other.outputs[0].token_ids)) == ("length", 9)
    with pytest.raises(InvalidRequestError, match="no token") as refused:
        llm.generate("Say", replace(how, structured_outputs=StructuredOutputsParams(regex="b")), use_tqdm=False)
    assert refused.value.param == "allowed_token_ids"


def test_what_max_tokens_cuts_off_ends_with_length_and_what_is_complete_with_stop(llm):
    cut = complete(llm, {"regex": "(ab){100}"}, max_tokens=5)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
    (token,) = llm.engine.tokenizer.encode("a")
    whole = complete(llm, {"regex": "a"}, max_tokens=1)
    assert (whole.finish_reason, whole.token_ids, whole.text) == ("stop", [token], "a")


def test_the_token_that_completes_a_grammar_is_part_of_the_text(llm):
    assert complete(llm, {"choice": ["no"]}).text == "no"
    assert complete(llm, {"choice": ["no"]}, ignore_eos=True).text == "no"
    assert complete(llm, {"choice": ["no"]}, min_tokens=50).text == "no"


def test_min_tokens_and_ignore_eos_hold_while_the_grammar_lets_them(llm):
    for seed in range(5):
        output = complete(llm, {"regex": "[a-z]{0,300}"}, min_tokens=12, seed=seed)
        assert len(output.token_ids) >= 12
        endless = complete(llm, {"regex": "[a-z]{0,3000}"}, ignore_eos=True, seed=seed)
        assert (endless.finish_reason, len(endless.token_ids)) == ("length", 60)
        assert re.fullmatch("[a-z]*", endless.text)


def test_stop_strings_and_stop_tokens_end_an_output_within_its_grammar(llm):
    output = complete(llm, {"regex": "(ab){100}"}, stop=["bab"])
    assert (output.finish_reason, output.text) == ("stop", "a")
    tokenizer = llm.engine.tokenizer
    (a,) = tokenizer.encode("a")
    output = complete(llm, {"regex": "[ab]{20}"}, stop_token_ids=[a], logit_bias={a: 100.0}, temperature=0.0)
    assert output.finish_reason == "stop"
    assert (output.token_ids, output.text) == ([a], "")


def test_logprobs_are_of_the_model_s_own_distribution(llm):
    output = complete(llm, {"choice": ["no"]}, logprobs=3)
    assert len(output.logprobs) == len(output.token_ids)
    assert all(len(told) >= 3 for told in output.logprobs)
    assert output.cumulative_logprob < -1, "among 49,152 tokens of random weights"


def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(llm, monkeypatch):
    from pagefold.structured.grammar import GrammarMatcher

    accept = GrammarMatcher.accept

    steps = {}

    def failing(self, token_id):
        accept(self, token_id)
        steps[id(self)] = steps.get(id(self), 0) + 1
        if steps[id(self)] == 3:
            self.error = "the test lets it fail"

    monkeypatch.setattr(GrammarMatcher, "accept", failing)
    wishes = [StructuredOutputsParams(regex="(ab){100}"), None]
    hows = [SamplingParams(max_tokens=10, ignore_eos=True, structured_outputs=wish) for wish in wishes]
    failed, free = llm.generate(["Say", "Say"], hows, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "after 3 tokens: the test lets it fail" in failed.error
    assert free.outputs[0].finish_reason == "length"
    audit(llm.engine.scheduler.core)


def test_a_bad_grammar_is_refused_before_anything_starts(llm):
    from pagefold.errors import InvalidRequestError

    with pytest.raises(InvalidRequestError, match="does not compile"):
        llm.generate(
            ["a", "b"], [SamplingParams(), SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))]
        )
    assert not llm.engine.has_work
    with pytest.raises(InvalidRequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})
