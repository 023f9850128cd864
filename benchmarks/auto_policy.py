"""What ``auto`` finds, which follows other eviction policies, against the best single one; a part of observe.py."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from report import Row
from rich.progress import track

from pagefold.kv import AUTO, POLICIES, make_policy
from pagefold.sim.cache_only import replay_cache_only
from pagefold.sim.traces import TraceRequest, parse_workload, read_trace, traces_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

ASKED_OF_BEST = 0.98
TRACE, TRACE_BLOCK, BLOCK = "mooncake_conversation.jsonl", 512, 64
CHANGING = "a workload that changes"
IN_TURN = "documents in turn"
PHASES = (
    "shared:num_requests=2500,num_prompts=300",
    "chat:num_chats=800,turn_gap_s=5-120,num_turns=1-9",
    IN_TURN,
    "retrieval:num_requests=2500,num_documents=3000",
    "chat:num_chats=600,turn_gap_s=5-120,num_turns=1-9,seed=3",
    "shared:num_requests=2500,num_prompts=300,seed=5",
)
"""Of the workload that changes: one after another, with nothing in common."""
NUM_IN_TURN, NUM_DOCUMENTS, DOCUMENT_BLOCKS = 2500, 220, 32
SHARED = "shared:num_requests=8000,num_prompts=300"
SIZES = {TRACE: (0.0034, 0.0207, 0.07, 0.172), CHANGING: (0.01, 0.03, 0.1), SHARED: (0.01, 0.03)}
"""Of caches, as shares of all prompt tokens. Of the trace: .5, 3, 10 and 25 million tokens."""


@dataclass(frozen=True)
class Replay:
    """One of a workload by name, with a policy, in a cache of a share of all its tokens."""

    workload: str
    policy: str
    share: float


@dataclass(frozen=True)
class Got:
    """Share of prompt tokens that were found; how often ``auto`` followed another, and whom last."""

    ratio: float
    num_switches: int = 0
    leader: str = ""


def documents_in_turn() -> list[TraceRequest]:
    """Return prompts that each ask something new of the next of some documents, around and around."""
    requests = []
    for index in range(NUM_IN_TURN):
        first = index % NUM_DOCUMENTS * DOCUMENT_BLOCKS
        ids = (*range(first, first + DOCUMENT_BLOCKS), NUM_DOCUMENTS * DOCUMENT_BLOCKS + index)
        requests.append(TraceRequest(0.0, len(ids) * BLOCK, 1, ids, BLOCK))
    return requests


@cache
def requests_of(workload: str) -> Sequence[TraceRequest]:
    """Return the requests of a workload; none where its file is not here."""
    if workload == TRACE:
        folder = traces_folder()
        return read_trace(folder / TRACE).requests if folder is not None and (folder / TRACE).is_file() else ()
    if workload == IN_TURN:
        return documents_in_turn()
    if workload != CHANGING:
        return parse_workload(workload).trace().requests
    found: list[TraceRequest] = []
    for number, phase in enumerate(PHASES):
        apart = number * 10**9
        found += [replace(one, prefix_ids=tuple(each + apart for each in one.prefix_ids)) for one in requests_of(phase)]
    return found


def run(replay: Replay) -> Got:
    """Run one."""
    requests = requests_of(replay.workload)
    block_size = TRACE_BLOCK if replay.workload == TRACE else BLOCK
    cache_tokens = round(replay.share * sum(request.prompt_tokens for request in requests))
    switches: list[str] = []

    def note(event: object) -> None:
        switches.append(getattr(event, "policy", ""))

    policy = make_policy(replay.policy, cache_tokens // block_size, note)
    report = replay_cache_only(requests, policy=policy, block_size=block_size, cache_tokens=cache_tokens)
    return Got(report.token_hit_ratio, max(0, len(switches) - 1), switches[-1] if switches else "")


def measure_auto() -> list[Row]:
    """Return what ``auto`` finds of each workload at each size, as a share of what the best single policy finds."""
    replays = [
        Replay(workload, policy, share)
        for workload, shares in SIZES.items()
        for share in shares
        for policy in POLICIES
        if requests_of(workload)
    ]
    with ProcessPoolExecutor() as pool:
        got = dict(zip(replays, track(pool.map(run, replays), "policies", total=len(replays)), strict=True))
    rows, shares_of_best = [], []
    for workload, shares in SIZES.items():
        for share in shares if requests_of(workload) else ():
            found = {policy: got[Replay(workload, policy, share)] for policy in POLICIES}
            auto = found.pop(AUTO)
            best = max(found, key=lambda policy: found[policy].ratio)
            shares_of_best.append(auto.ratio / found[best].ratio)
            told = f"{auto.ratio:.4f}, {best} {found[best].ratio:.4f}; {auto.num_switches} switches, {auto.leader} last"
            values = {"auto": auto.ratio, "switches": auto.num_switches}
            values |= {policy: one.ratio for policy, one in found.items()}
            rows.append(Row(f"  {workload}, {share:.2%} of its tokens", "", told, values=values))
    least = min(shares_of_best)
    told = f">= {ASKED_OF_BEST} x"
    return [
        Row("auto, of the best single policy's hits: the least", told, f"{least:.3f} x", least >= ASKED_OF_BEST),
        *rows,
    ]
