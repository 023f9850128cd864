"""OutputText: however a text comes in pieces, it is cut where the first stop string is complete, and nothing is let out
that could still become one. Engine: what can never be served is refused with the field at fault.

The slow twin adds one character after another and asks each time whether the text ends with a stop string.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagefold.engine.engine import Engine
from pagefold.engine.limits import ModelLimits
from pagefold.engine.logprobs import Logprob, PromptLogprobs
from pagefold.engine.outputs import CompletionOutput, OutputDelta, OutputText, RequestOutput
from pagefold.errors import InvalidRequestError
from pagefold.kv import KVCore, Namespace, audit
from pagefold.memory.capacity import Capacity
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import NullRunner
from pagefold.steps import TokenLogprobs
from pagefold.tokenizer import Tokenizer

TEXTS = st.text("ab.", max_size=30)  # few letters: stop strings are found, nearly found, and overlap
STOPS = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4).map(tuple)


class Pieces:
    """A detokenizer of a text that is cut at will: token ``i`` is piece ``i``, and the last one waits for the flush."""

    def __init__(self, pieces):
        self._pieces = pieces

    def push(self, token_id):
        return self._pieces[token_id]

    def flush(self):
        return self._pieces[-1]


def cut_by_twin(text, stop, num_passed=0):
    """Return the text before the stop string that is complete first, the longest of those; and whether there is one.

    What is complete within the first ``num_passed`` characters does not count.
    """
    for end in range(num_passed + 1, len(text) + 1):
        ends = [one for one in stop if text[:end].endswith(one)]
        if ends:
            return text[: end - max(map(len, ends))], True
    return text, False


@st.composite
def pieces_of_text(draw):
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def push_all(pieces, stop, min_tokens=0):
    """Return what came out with each piece, and whether a stop string was met."""
    output = OutputText(Pieces(pieces), stop, min_tokens)
    return [*(output.push(at) for at in range(len(pieces) - 1)), output.flush()], output.stopped


# The text.


@settings(max_examples=500)
@given(pieces_of_text(), STOPS)
@example(["ab.", ""], ("ab.", "b"))  # b is complete first, also when all comes at once
@example(["a", "b.", ""], (".", "ab."))  # both are complete at once: the longest is cut
@example(["aab", "ab.", ""], ("aba",))  # the beginning that looked right was not it
@example(["b", "a"], ("ba",))  # complete by the flush
def test_any_split_of_a_text_is_cut_at_the_first_stop_string(pieces, stop):
    out, stopped = push_all(pieces, stop)
    assert ("".join(out), stopped) == cut_by_twin("".join(pieces), stop)


@settings(max_examples=500)
@given(pieces_of_text(), STOPS, st.integers(0, 8))
@example(["ab", "cdef", ""], ("ab", "bc"), 1)  # what is complete too early is passed over, and not found later
@example(["a", "b", "x"], ("x",), 2)  # the flush brings text of the last token
def test_a_stop_string_complete_within_min_tokens_does_not_count(pieces, stop, min_tokens):
    num_passed = len("".join(pieces[:min_tokens] if min_tokens < len(pieces) - 1 else pieces)) if min_tokens else 0
    out, stopped = push_all(pieces, stop, min_tokens)
    assert ("".join(out), stopped) == cut_by_twin("".join(pieces), stop, num_passed)


@settings(max_examples=300)
@given(pieces_of_text(), STOPS)
def test_what_is_out_can_no_longer_be_the_beginning_of_a_stop_string(pieces, stop):
    output, out, text = OutputText(Pieces(pieces), stop), "", ""
    for at, piece in enumerate(pieces[:-1]):
        out += output.push(at)
        text += piece
        if output.stopped:
            break
        assert text.startswith(out)
        for start in range(len(out)):
            assert not any(one.startswith(text[start:]) or text[start:].startswith(one) for one in stop)


@given(pieces_of_text(), STOPS)
def test_no_more_is_held_back_than_a_stop_string_without_its_last_character(pieces, stop):
    output, out, text = OutputText(Pieces(pieces), stop), "", ""
    for at, piece in enumerate(pieces[:-1]):
        out += output.push(at)
        text += piece
        if output.stopped:
            break
        assert len(text) - len(out) <= max(map(len, stop), default=1) - 1


@given(pieces_of_text())
def test_without_stop_strings_every_piece_comes_at_once(pieces):
    assert push_all(pieces, ()) == (pieces, False)


def test_characters_are_counted_whether_or_not_they_are_held_back():
    output = OutputText(Pieces(["so", " S", "T", "!"]), ("STOP",))
    counts = []
    for at in range(3):
        output.push(at)
        counts.append(output.num_characters)
    output.flush()
    assert [*counts, output.num_characters] == [2, 4, 5, 6]


def test_what_is_held_back_comes_with_the_flush():
    assert push_all(["so long, ST", "", ""], ("STOP",)) == (["so long,", "", " ST"], False)


def test_a_stop_string_is_met_across_pieces_and_nothing_comes_after_it():
    output = OutputText(Pieces(["one ST", "O", "P two", " three", "!"]), ("STOP",))
    assert [output.push(at) for at in range(4)] == ["one", " ", "", ""]
    assert output.stopped
    assert output.flush() == ""


@pytest.mark.parametrize(
    ("pieces", "met"), [(["a STO", "P"], "STOP"), (["an en", "d"], "end"), (["the END", ""], None)]
)
def test_it_says_which_stop_string_was_met(pieces, met):
    output = OutputText(Pieces([*pieces, ""]), ("STOP", "end"))
    for at in range(len(pieces)):
        output.push(at)
    assert output.stop_reason == met


def test_without_a_detokenizer_there_is_no_text():
    output = OutputText(None, ("a",))
    assert (output.push(7), output.flush(), output.stopped) == ("", "", False)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 49151), max_size=20), st.data())
def test_stop_strings_of_real_tokens_are_cut_where_the_whole_text_has_them(tokenizer, token_ids, data):
    free = OutputText(tokenizer.detokenizer([1]), ())
    text = "".join([*(free.push(token_id) for token_id in token_ids), free.flush()])
    at = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = (text[at : at + data.draw(st.integers(1, 5))] or "?", "never this")
    output = OutputText(tokenizer.detokenizer([1]), stop)
    out = "".join([*(output.push(token_id) for token_id in token_ids), output.flush()])
    assert (out, output.stopped) == cut_by_twin(text, stop)


def test_a_result_collects_its_deltas():
    result = RequestOutput("r", "hi", [1, 2], [CompletionOutput(index=0)])
    assert not result.finished
    result.add(OutputDelta("r", "a", (5,), 1))
    result.add(OutputDelta("r", "b", (6, 7), 1, "error", "no more memory"))
    assert (result.outputs[0].text, result.outputs[0].token_ids) == ("ab", [5, 6, 7])
    assert (result.finished, result.outputs[0].finish_reason) == (True, "error")
    assert (result.error, result.num_cached_tokens) == ("no more memory", 1)
    assert (result.outputs[0].logprobs, result.outputs[0].cumulative_logprob, result.prompt_logprobs) == (None,) * 3


def test_a_result_collects_logprobs():
    result = RequestOutput("r", "hi", [1, 2], [CompletionOutput(index=0)])
    five, six, two = {5: Logprob(-1.5, 1)}, {6: Logprob(-0.25, 2), 5: Logprob(-0.1, 1)}, {2: Logprob(-3.0, 9)}
    of_prompt = PromptLogprobs(None, [2], [TokenLogprobs(-3.0, 9, ())])
    result.add(OutputDelta("r", "a", (5,), 0, logprobs=(five,), prompt_logprobs=of_prompt, cumulative_logprob=-1.5))
    result.add(OutputDelta("r", "b", (6,), 0, logprobs=(six,), cumulative_logprob=-1.75))
    assert result.outputs[0].logprobs == [five, six]
    assert result.outputs[0].cumulative_logprob == -1.75
    assert result.prompt_logprobs == [None, two]


# The engine: what it refuses, and how outputs end.


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return Tokenizer(smollm2)


def make_engine(tokenizer=None, says=(), *, vocab_size=49152, eos=()):
    """Make an engine that samples ``says``, one token after another."""
    core = KVCore(16, block_size=4)
    return Engine(
        scheduler=Scheduler(core, SchedulerLimits(4, 64)),
        runner=NullRunner(lambda _, draw: says[draw]),
        tokenizer=tokenizer,
        limits=ModelLimits(vocab_size, eos, Namespace("m", "l", "d")),
        capacity=Capacity(0, 0, 16, 4, max_model_len=20, num_blocks_per_request=2),
    )


def run(engine, sampling):
    """Run one request to its end; return its text, its tokens and why it ended."""
    engine.add("r", [1, 2, 3], sampling)
    result = RequestOutput("r", None, [1, 2, 3], [CompletionOutput(index=0)])
    while engine.has_work:
        for delta in engine.step():
            result.add(delta)
    audit(engine.scheduler.core)
    output = result.outputs[0]
    return output.text, output.token_ids, output.finish_reason


@pytest.mark.parametrize(
    ("prompt", "settings_", "param", "message"),
    [
        ([], {}, "prompt", "empty"),
        ([1] * 20, {}, "prompt", "20 tokens; max_model_len is 20"),
        ([1] * 500, {}, "prompt", "500 tokens"),
        ([1, -1], {}, "prompt", "Token id -1"),
        ([1, 100], {}, "prompt", "Token id 100"),
        ([1], {"stop_token_ids": (99, 100)}, "stop_token_ids", "Token id 100"),
        ([1], {"stop_token_ids": (-5,)}, "stop_token_ids", "Token id -5"),
        ([1], {"stop": "\n"}, "stop", "need a tokenizer"),
        ([1], {"logit_bias": {99: 1.0, 100: 1.0}}, "logit_bias", "Token id 100"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias", "Token id -1"),
        ([1], {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens is 5, and the output has at most 4"),
        ([1], {"min_tokens": 20, "max_tokens": None}, "min_tokens", "at most 19 tokens"),
        ([1], {"min_tokens": 1, "stop_token_ids": range(100)}, "stop_token_ids", "Every token"),
    ],
)
def test_what_can_never_be_served_is_refused_with_its_field(prompt, settings_, param, message):
    engine = make_engine(vocab_size=100)
    for refuse in (engine.check, lambda *request: engine.add("r", *request)):
        with pytest.raises(InvalidRequestError, match=message) as refused:
            refuse(prompt, SamplingParams(**settings_))
        assert refused.value.param == param
        assert refused.value.remedy
    assert not engine.has_work


@pytest.mark.parametrize("prompt", [[0], [99], [5] * 19])
def test_what_is_just_within_the_limits_is_served(prompt):
    engine = make_engine(says=[7], vocab_size=100)
    how = SamplingParams(max_tokens=1, min_tokens=1, stop_token_ids=(0, 99), logit_bias={0: 1.0, 99: 1.0})
    engine.add("r", prompt, how)
    assert [delta.token_ids for delta in engine.step()] == [(7,)]


def test_stop_strings_are_taken_where_there_is_a_tokenizer(tokenizer):
    make_engine(tokenizer).check([1], SamplingParams(stop="\n"))


def test_an_id_is_in_use_until_its_request_has_ended():
    engine = make_engine(says=[7, 8, 9])
    engine.add("r", [1, 2], SamplingParams(max_tokens=3))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="'r' is in use") as refused:
            engine.add("r", [1, 2], SamplingParams())
        assert refused.value.param == "request_id"
        engine.step()
    engine.add("other", [1, 2], SamplingParams(max_tokens=1))
    engine.step()
    engine.add("r", [1, 2], SamplingParams(max_tokens=1))
    assert [delta.request_id for delta in engine.step()] == ["r"]
    engine.add("r", [1, 2], SamplingParams())
    assert engine.abort("r")
    engine.add("r", [1, 2], SamplingParams())


def test_a_stop_string_ends_a_request_and_what_follows_is_cut(tokenizer):
    says = tokenizer.encode("one two three four")
    text, token_ids, why = run(make_engine(tokenizer, says), SamplingParams(max_tokens=4, stop="wo th"))
    assert (text, token_ids, why) == ("one t", says[:3], "stop")


def test_a_stop_string_ends_nothing_within_min_tokens(tokenizer):
    says = tokenizer.encode("one two three four two")
    for min_tokens, expected in ((1, "one "), (2, "one two three four "), (4, "one two three four ")):
        how = SamplingParams(max_tokens=5, min_tokens=min_tokens, stop="two")
        assert run(make_engine(tokenizer, says), how)[0] == expected
    how = SamplingParams(max_tokens=5, min_tokens=5, stop="two")
    assert run(make_engine(tokenizer, says), how) == ("one two three four two", says, "length")


def test_a_stop_string_met_by_the_last_token_is_a_stop(tokenizer):
    says = tokenizer.encode("one two three")
    assert run(make_engine(tokenizer, says), SamplingParams(max_tokens=3, stop="ree"))[::2] == ("one two th", "stop")


def test_what_was_held_back_comes_when_the_length_is_reached(tokenizer):
    says = tokenizer.encode("one two three")
    how = SamplingParams(max_tokens=3, stop="three blind mice")
    assert run(make_engine(tokenizer, says), how) == ("one two three", says, "length")


def test_a_stop_token_is_a_token_and_no_text_and_lets_out_what_was_held_back(tokenizer):
    says = tokenizer.encode("one two three")
    how = SamplingParams(stop="two blind mice", stop_token_ids=says[2:])
    assert run(make_engine(tokenizer, says), how) == ("one two", says, "stop")


def test_the_end_of_sequence_token_ends_unless_it_is_ignored(tokenizer):
    says = tokenizer.encode("one two three")
    engine = make_engine(tokenizer, says, eos=(says[1],))
    assert run(engine, SamplingParams(max_tokens=3)) == ("one", says[:2], "stop")
    assert run(engine, SamplingParams(max_tokens=3, ignore_eos=True)) == ("one two three", says, "length")


def test_half_a_character_at_the_end_is_left_out(tokenizer):
    says = tokenizer.encode("🜚")[:2]
    assert run(make_engine(tokenizer, says), SamplingParams(max_tokens=2)) == ("", says, "length")
    how = SamplingParams(max_tokens=2, stop="\ufffd")
    assert run(make_engine(tokenizer, says), how) == ("", says, "length")
    says = [*tokenizer.encode("ok"), *says]
    engine = make_engine(tokenizer, says, eos=(2,))
    assert run(engine, SamplingParams(max_tokens=len(says))) == ("ok", says, "length")


def test_a_stop_string_or_token_is_part_of_the_text_if_asked_for(tokenizer):
    says = tokenizer.encode("one two three")
    keeps = {"include_stop_str_in_output": True}
    assert run(make_engine(tokenizer, says), SamplingParams(stop=["wo"], **keeps)) == ("one two", says[:2], "stop")
    assert run(make_engine(tokenizer, says), SamplingParams(stop=["e t"], **keeps)) == ("one t", says[:2], "stop")
    how = SamplingParams(stop_token_ids=says[1:2], **keeps)
    assert run(make_engine(tokenizer, says), how) == ("one two", says[:2], "stop")
    ends = [*says[:1], 2]
    engine = make_engine(tokenizer, ends, eos=(2,))
    assert run(engine, SamplingParams(**keeps)) == ("one", ends, "stop"), "a special token has no text"
    shown = SamplingParams(skip_special_tokens=False, **keeps)
    assert run(engine, shown) == ("one<|im_end|>", ends, "stop")


@given(pieces_of_text(), STOPS)
def test_a_text_that_keeps_its_stop_string_ends_with_it(pieces, stop):
    output = OutputText(Pieces(pieces), stop, keeps_stop=True)
    out = "".join([*(output.push(token_id) for token_id in range(len(pieces) - 1)), output.flush()])
    text, stopped = cut_by_twin("".join(pieces), stop)
    assert output.stopped == stopped
    assert out.startswith(text)
    assert (out[len(text) :] in stop) if stopped else out == text


def test_without_output_a_prompt_is_computed_and_nothing_is_sampled(tokenizer):
    engine = make_engine(tokenizer, tokenizer.encode("one"))
    assert run(engine, SamplingParams(max_tokens=0)) == ("", [], "length")
