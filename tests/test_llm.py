"""LLM: vLLM's names, results in order, typed errors before anything starts, and no block left behind."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest

from pagefold import LLM, SamplingParams
from pagefold.errors import BudgetTooSmallError, ConfigError, InvalidRequestError, ModelNotFoundError
from pagefold.kv import audit

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_chat_model: Path) -> LLM:
    return LLM(model=str(tiny_chat_model), kv_cache_memory_bytes=2**20, max_model_len=128, max_num_seqs=8)


@pytest.fixture(autouse=True)
def _nothing_is_left(llm: LLM):
    yield
    core = llm.engine.scheduler.core
    audit(core)
    assert not core.num_active
    assert not llm.engine.scheduler.has_work


def test_results_come_in_order_and_have_vllms_names(llm: LLM) -> None:
    prompts: list[Any] = ["one", {"prompt": "two words"}, {"prompt_token_ids": [5, 6, 7]}] * 6  # more than seats
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 5, ignore_eos=True) for i in range(len(prompts))]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [1 + i % 5 for i in range(len(prompts))]
    assert [result.prompt for result in results[:3]] == ["one", "two words", None]
    assert results[2].prompt_token_ids == [5, 6, 7]
    assert all(result.outputs[0].finish_reason == "length" and result.finished for result in results)
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    assert all(result.outputs[0].text == tokenizer.decode(result.outputs[0].token_ids) for result in results)


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    (text,) = llm.generate("hello", GREEDY, use_tqdm=False)
    (again,) = llm.generate({"prompt_token_ids": text.prompt_token_ids}, GREEDY)  # with its progress bar
    assert again.outputs[0].token_ids == text.outputs[0].token_ids


def test_a_prompt_sent_again_is_cached_but_for_its_last_token(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(1000, 1064))}
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 63)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_seed_draws_the_same_in_any_batch(llm: LLM) -> None:
    how = SamplingParams(temperature=1.0, max_tokens=12, seed=7, ignore_eos=True)
    (alone,) = llm.generate("a prompt", how, use_tqdm=False)
    among = llm.generate(["x", "a prompt", "y"], [SamplingParams(max_tokens=12), how, GREEDY], use_tqdm=False)[1]
    assert alone.outputs[0].token_ids == among.outputs[0].token_ids


def test_output_is_limited_by_max_model_len(llm: LLM) -> None:
    how = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (result,) = llm.generate({"prompt_token_ids": [9] * 100}, how, use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 28
    assert result.outputs[0].finish_reason == "length"


def test_stop_strings_are_not_part_of_the_text(llm: LLM) -> None:
    (free,) = llm.generate("stop here", GREEDY, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    how = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=(stop,))
    (stopped,) = llm.generate("stop here", how, use_tqdm=False)
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].token_ids == free.outputs[0].token_ids[: len(stopped.outputs[0].token_ids)]


def test_a_stop_token_ends_the_output(llm: LLM) -> None:
    (free,) = llm.generate("stop there", GREEDY, use_tqdm=False)
    third = free.outputs[0].token_ids[2]
    how = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(third,))
    (stopped,) = llm.generate("stop there", how, use_tqdm=False)
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].token_ids[-1] == third
    assert third not in stopped.outputs[0].token_ids[:-1]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [1] * 128}, "prompt"),
        ({"prompt_token_ids": [-1]}, "prompt"),
        ({"prompt_token_ids": [49152]}, "prompt"),
        ({"prompt_token_ids": ["a"]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({}, "prompt"),
        (7, "prompt"),
        ({"prompt": 7}, "prompt"),
        ("half a pair \ud800", "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_before_any_runs(llm: LLM, prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        llm.generate(["a good one", prompt], GREEDY, use_tqdm=False)
    assert refused.value.param == param
    assert refused.value.remedy


def test_as_many_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("runner", "run"),
        ("scheduler", "add"),
        ("scheduler", "schedule"),
        ("scheduler._rows._relief", "room_for_all"),
        ("scheduler._flight", "take"),
        ("scheduler.core.moves", "take_copies"),
        ("scheduler.core.publishing", "commit"),
    ],
)
def test_ctrl_c_at_any_moment_gives_the_blocks_back(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str, name: str
) -> None:
    """The signal comes in the midst of it; the batch ends between two steps."""
    owner = attrgetter(part)(llm.engine)
    real = getattr(owner, name)
    num_calls = 0

    def interrupted(*args: Any, **how: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **how)

    llm.engine.reset_prefix_cache()  # so that there is something to commit
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(owner, name, interrupted)
    prompts = [{"prompt_token_ids": [num, *range(40)]} for num in range(3)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    assert not llm.engine.scheduler.has_work
    assert len(llm.generate("again", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_a_runner_that_is_interrupted_leaves_no_step_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(plan: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert len(llm.generate("again", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_threads_take_turns(llm: LLM) -> None:
    expected = [llm.generate(f"prompt {i}", GREEDY, use_tqdm=False)[0].outputs[0].token_ids for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda i: llm.generate(f"prompt {i}", GREEDY, use_tqdm=False), range(4)))
    assert [results[0].outputs[0].token_ids for results in got] == expected


def test_a_step_that_fails_is_run_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = llm.generate({"prompt_token_ids": [11, 12, 13]}, GREEDY, use_tqdm=False)
    run = llm.engine.runner.run
    fails = iter([True, False, True, True, False, False, True])

    def flaky(plan):
        if next(fails, False):
            msg = "injected"
            raise RuntimeError(msg)
        return run(plan)

    monkeypatch.setattr(llm.engine.runner, "run", flaky)
    (got,) = llm.generate({"prompt_token_ids": [11, 12, 13]}, GREEDY, use_tqdm=False)
    assert got.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_step_that_keeps_failing_ends_with_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan):
        msg = "no more memory"
        raise MemoryError(msg)

    monkeypatch.setattr(llm.engine.runner, "run", broken)
    results = llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert [result.outputs[0].finish_reason for result in results] == ["error", "error"]
    assert all("no more memory" in (result.error or "") for result in results)


@pytest.mark.parametrize("how", [{"temperature": 0}, [{"temperature": 0}], "greedy", 5])
def test_sampling_params_are_of_their_type(llm: LLM, how: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params is"):
        llm.generate(["a"], how)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_num_seqs": "8"},
        {"block_size": 16.0},
        {"block_size": True},
        {"kv_cache_memory_bytes": "1G"},
        {"kv_cache_memory_bytes": 1e6},
        {"enable_prefix_caching": "no"},
        {"max_model_len": 300.5},
        {"seed": "x"},
        {"dtype": 32},
    ],
    ids=str,
)
def test_a_setting_of_the_wrong_type_is_refused_by_name(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError, match=f"{name} is {value!r}") as refused:
        LLM("smollm2-135m", **setting)
    assert refused.value.remedy


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no setting max_seq_len"):
        LLM("smollm2-135m", max_seq_len=5)


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        LLM(str(tmp_path / "nothing-here"))


def test_a_budget_that_is_too_small_names_one_that_works(tiny_chat_model: Path) -> None:
    with pytest.raises(BudgetTooSmallError) as refused:
        LLM(str(tiny_chat_model), kv_cache_memory_bytes=4096, max_model_len=128)
    smallest = int(refused.value.remedy.split("kv_cache_memory_bytes=")[1].split(";")[0])
    tight = LLM(str(tiny_chat_model), kv_cache_memory_bytes=smallest, max_model_len=128)
    (result,) = tight.generate(
        {"prompt_token_ids": [3] * 100}, SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    )
    assert len(result.outputs[0].token_ids) == 28
    with pytest.raises(BudgetTooSmallError):
        LLM(str(tiny_chat_model), kv_cache_memory_bytes=smallest - 1, max_model_len=128)


def test_logprobs_come_with_vllms_names(llm: LLM) -> None:
    how = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    prompt = {"prompt_token_ids": list(range(2000, 2040))}
    llm.generate(prompt, GREEDY, use_tqdm=False)
    (told,) = llm.generate(prompt, how, use_tqdm=False)
    output, tokenizer = told.outputs[0], llm.engine.tokenizer
    assert tokenizer is not None
    assert output.logprobs is not None
    assert told.prompt_logprobs is not None
    assert [next(iter(found)) for found in output.logprobs] == output.token_ids
    for token_id, found in zip(output.token_ids, output.logprobs, strict=True):
        assert len(found) == 3
        assert found[token_id].rank == 1, "greedy takes the likeliest"
        assert found[token_id].decoded_token == tokenizer.token_texts([token_id])[0]
    told_of = zip(output.token_ids, output.logprobs, strict=True)
    assert output.cumulative_logprob == pytest.approx(sum(found[token_id].logprob for token_id, found in told_of))
    first, *rest = told.prompt_logprobs
    assert first is None
    assert [next(iter(found)) for found in rest if found] == told.prompt_token_ids[1:]
    assert told.num_cached_tokens == 0, "its logits were wanted"
    (plain,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None, None)
    assert plain.num_cached_tokens == 32


def test_a_seed_draws_the_same_in_any_batch_with_penalties_too(llm: LLM) -> None:
    how = SamplingParams(
        max_tokens=12, seed=7, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.5, min_p=1e-6
    )
    others = [SamplingParams(max_tokens=12, presence_penalty=2.0, logit_bias={5: 50.0}, logprobs=2), GREEDY]
    (alone,) = llm.generate("a prompt", how, use_tqdm=False)
    among = llm.generate(["x", "a prompt", "y"], [others[0], how, others[1]], use_tqdm=False)[1]
    assert alone.outputs[0].token_ids == among.outputs[0].token_ids


def test_a_bias_decides(llm: LLM) -> None:
    how = SamplingParams(max_tokens=4, ignore_eos=True, logit_bias={777: 100.0})
    (result,) = llm.generate("anything", how, use_tqdm=False)
    assert result.outputs[0].token_ids == [777] * 4


# Metrics.


def _counted(llm: LLM) -> dict[str, float]:
    """Every sample without labels of its own, by name."""
    samples = [sample for family in llm.get_metrics() for sample in family.samples]
    return {sample.name: sample.value for sample in samples if set(sample.labels) == {"model_name", "engine"}}


def test_who_does_not_ask_for_metrics_has_none(llm: LLM) -> None:
    llm.generate("hello", GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match="disable_log_stats"):
        llm.get_metrics()


def test_metrics_are_of_this_llm_alone_and_do_not_grow(llm: LLM, tiny_chat_model: Path) -> None:
    import prometheus_client

    everywhere = prometheus_client.generate_latest()
    counting, other = (
        LLM(str(tiny_chat_model), disable_log_stats=False, kv_cache_memory_bytes=2**20, max_model_len=128)
        for _ in range(2)
    )
    results = counting.generate(["one", "two words", "and three words"], GREEDY, use_tqdm=False)
    llm.generate("not counted", GREEDY, use_tqdm=False)
    counted = _counted(counting)
    num_prompt_tokens = sum(len(result.prompt_token_ids) for result in results)
    assert counted["vllm:prompt_tokens_total"] == num_prompt_tokens
    assert counted["vllm:generation_tokens_total"] == 24
    assert counted["vllm:e2e_request_latency_seconds_count"] == 3
    assert counted["vllm:inter_token_latency_seconds_count"] == 21
    assert counted["pagefold:num_wasted_slots"] == 0
    assert _counted(other)["vllm:generation_tokens_total"] == 0
    num_samples = sum(len(family.samples) for family in counting.get_metrics())
    counting.generate([f"number {index}" for index in range(40)], GREEDY, use_tqdm=False)
    assert sum(len(family.samples) for family in counting.get_metrics()) == num_samples
    assert _counted(counting)["vllm:e2e_request_latency_seconds_count"] == 43
    ours = prometheus_client.generate_latest().count(b"vllm:"), everywhere.count(b"vllm:")
    assert ours == (0, 0), "nothing goes into the library's global registry"


SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True, seed=30)


def exact_llm(folder: Path, **settings: Any) -> LLM:
    """In float64, where what a sample draws does not hang on how a batch is rounded."""
    settings = {"kv_cache_memory_bytes": 2**21, "max_model_len": 128, "max_num_seqs": 8} | settings
    return LLM(model=str(folder), dtype="float64", attention_backend="reference", **settings)


@pytest.fixture(scope="module")
def exact(tiny_chat_model: Path) -> LLM:
    return exact_llm(tiny_chat_model)


def test_samples_are_those_of_requests_with_seeds_that_count_up(exact: LLM) -> None:
    prompts = ["first prompt", {"prompt_token_ids": list(range(900, 933))}]
    params = [replace(SAMPLED, n=4, logprobs=1, prompt_logprobs=0), replace(SAMPLED, n=3, seed=50)]
    results = exact.generate(prompts, params, use_tqdm=False)
    for prompt, how, result in zip(prompts, params, results, strict=True):
        assert [output.index for output in result.outputs] == list(range(how.n))
        assert result.finished
        assert len({tuple(output.token_ids) for output in result.outputs}) == how.n
        for index, output in enumerate(result.outputs):
            single = replace(how, n=1, seed=(how.seed or 0) + index)
            (alone,) = exact.generate(prompt, single, use_tqdm=False)
            assert output.token_ids == alone.outputs[0].token_ids
            assert output.text == alone.outputs[0].text
            assert output.cumulative_logprob == pytest.approx(alone.outputs[0].cumulative_logprob)
            assert (output.logprobs is None) == (how.logprobs is None)
            assert (result.prompt_logprobs is None) == (how.prompt_logprobs is None)


def test_samples_without_a_seed_differ(llm: LLM) -> None:
    (result,) = llm.generate("no seed", replace(SAMPLED, n=8, seed=None), use_tqdm=False)
    assert len({tuple(output.token_ids) for output in result.outputs}) == 8


def test_best_of_keeps_the_highest_logprobs_per_token(exact: LLM) -> None:
    """Also where outputs are of unequal length: one token in ten ends them."""
    how = replace(SAMPLED, max_tokens=20, stop_token_ids=tuple(range(0, 49152, 10)))
    (all_of_them,) = exact.generate("the best", replace(how, n=8, logprobs=0), use_tqdm=False)
    assert len({len(output.token_ids) for output in all_of_them.outputs}) > 1
    (result,) = exact.generate("the best", replace(how, n=3, best_of=8), use_tqdm=False)
    ranked = sorted(
        all_of_them.outputs,
        key=lambda output: (output.cumulative_logprob or 0.0) / len(output.token_ids),
        reverse=True,
    )
    assert [output.token_ids for output in result.outputs] == [output.token_ids for output in ranked[:3]]
    for output, expected in zip(result.outputs, ranked, strict=False):
        assert output.cumulative_logprob == pytest.approx(expected.cumulative_logprob)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert all(output.logprobs is None for output in result.outputs)


def test_more_samples_than_seats_are_refused_before_any_runs(llm: LLM) -> None:
    for param, how in (("n", replace(SAMPLED, n=9)), ("best_of", replace(SAMPLED, best_of=9))):
        with pytest.raises(InvalidRequestError, match=f"{param} is 9, but at most 8 sequences") as refused:
            llm.generate(["a", "b"], [SAMPLED, how], use_tqdm=False)
        assert refused.value.param == param
        assert "max_num_seqs" in refused.value.remedy


def test_memory_for_one_sample_at_a_time_is_enough(exact: LLM, tiny_chat_model: Path) -> None:
    tight = exact_llm(tiny_chat_model, kv_cache_memory_bytes=8 * 2**13)
    assert tight.engine.capacity.num_blocks == 8
    prompt = {"prompt_token_ids": list(range(100, 201))}
    how = replace(SAMPLED, n=5, max_tokens=27)
    (result,), (roomy,) = (llm.generate(prompt, how, use_tqdm=False) for llm in (tight, exact))
    assert [output.token_ids for output in result.outputs] == [output.token_ids for output in roomy.outputs]


def test_an_id_of_a_sample_is_in_use_too(llm: LLM) -> None:
    engine = llm.engine
    engine.add("a", [1, 2], replace(SAMPLED, n=3))
    for name, how in (("a", SAMPLED), ("a/2", SAMPLED)):
        with pytest.raises(InvalidRequestError, match="in use"):
            engine.add(name, [1, 2], how)
    assert engine.abort("a")
    assert not engine.abort("a")


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_all_samples_are_aborted_together(llm: LLM, num_steps: int) -> None:
    engine = llm.engine
    engine.add("a", [1, 2, 3], replace(SAMPLED, n=4))
    deltas = [delta for _ in range(num_steps) for delta in engine.step()]
    assert [delta.index for delta in deltas] == [0, 1, 2, 3] * num_steps
    assert {delta.request_id for delta in deltas} <= {"a"}
    assert engine.abort("a")
    assert not engine.has_work
    assert engine.step() == []
