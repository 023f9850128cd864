"""A recording of a model with windows: the replay has its cache groups, and keeps the windows that it kept."""

from random import Random

import pytest

from pagefold.config import EngineConfig
from pagefold.errors import TraceError
from pagefold.kv import KEEP_ALL, KeepRule, KVCore, PinLimits, make_policy
from pagefold.kv.policies import DEFAULT_POLICY
from pagefold.observe.recorder import TraceRecorder
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import NullRunner
from pagefold.sim.replay_recording import replay_recording
from pagefold.sim.traces.read_recording import read_recording

SAMPLING = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
RULES = (KEEP_ALL, KeepRule(40), KeepRule(40))
NUM_BLOCKS = 30  # of each group


def record(file, rules, knows_messages=True):
    """Serve 8 conversations of 4 turns from a pool that is too small; return what was found in all of them."""
    config = EngineConfig(model="none", max_num_seqs=3, max_num_batched_tokens=64)
    time = iter(range(10**6))
    recorder = TraceRecorder(file, lambda: float(next(time)))
    num_blocks = NUM_BLOCKS * len(rules)
    recorder.begin(config, num_blocks, 0, rules)
    core = KVCore(
        num_blocks,
        block_size=config.block_size,
        rules=rules,
        policy=make_policy(DEFAULT_POLICY),
        pin_limits=PinLimits(config.max_pinned_share, config.pin_half_life_s),
        emit=recorder,
    )
    limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens)
    scheduler = Scheduler(core, limits, admission=config.admission, emit=recorder)
    random, runner = Random(3), NullRunner()
    said = [[*range(100)] + [random.randrange(1000, 10**6) for _ in range(60)] for _ in range(8)]
    ends = [[100] for _ in said]
    for turn in range(4):
        requests = []
        for chat in range(len(said)):
            ends[chat].append(len(said[chat]))
            stop = StopRule(frozenset(), len(said[chat]) + random.randrange(1, 60))
            marks = tuple(ends[chat]) if knows_messages else ()
            name = f"{chat}-{turn}"
            requests.append(Request(name, said[chat], SAMPLING, stop=stop, seed=chat, message_ends=marks))
            scheduler.add(requests[-1])
        now = 0.0
        while scheduler.has_work:
            now += 1.0
            scheduler.apply(runner.run(scheduler.schedule(now + 10_000 * turn)))
        for chat, request in enumerate(requests):
            said[chat] = [*request.token_ids, *(random.randrange(1000, 10**6) for _ in range(20))]
    recorder.close()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "rules",
    [
        RULES,
        (KeepRule(40),),
        (KEEP_ALL, KeepRule(32, is_chunked=True)),
        (KEEP_ALL,),
        (KeepRule(40, num_sinks=20), KEEP_ALL),
    ],
)
@pytest.mark.parametrize("knows_messages", [True, False])
def test_a_replay_finds_and_evicts_what_was_found_and_evicted(tmp_path, rules, knows_messages):
    file = tmp_path / "trace.jsonl"
    record(file, rules, knows_messages)
    recording = read_recording(file)
    assert recording.settings.rules == rules
    report = replay_recording(recording)
    assert report.first_difference == ""
    assert report.num_equal_steps == report.num_steps > 100
    assert report.num_evictions > 100
    assert report.num_hit_tokens > 0


@pytest.mark.parametrize(
    ("keeps", "told"),
    [
        ("[[0,false]]", "keeps is 0"),
        ("[[40]]", "two values"),
        ('[[40,"no"]]', "not true or false"),
        ("40", "not a list"),
        ("[[1.5,false]]", "keeps is 1.5"),
        ("[[40,false,-1]]", "keeps is -1"),
        ("[[40,true,4]]", "4 sinks beside no window that slides"),
        ("[[null,false,4]]", "4 sinks beside no window that slides"),
        ("[[40,false,4,4]]", "two values"),
        ("[[256,true,0,1]]", "kv_keep"),
    ],
)
def test_groups_that_no_server_writes_are_refused(tmp_path, keeps, told):
    file = tmp_path / "trace.jsonl"
    record(file, (KeepRule(40),))
    lines = file.read_text(encoding="utf-8").splitlines()
    assert '"keeps":[[40,false]]' in lines[0]
    lines[0] = lines[0].replace('"keeps":[[40,false]]', f'"keeps":{keeps}')
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(TraceError, match=told):
        read_recording(file)
