"""The walk of a request, and a request that is preempted on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from svg import Drawing

from pagefold.events import PrefixLookup, RequestPreempted
from pagefold.kv import KVCore, audit
from pagefold.request import Request, RequestStatus, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import NullRunner

if TYPE_CHECKING:
    from pagefold.events import Event

__all__ = ["preemption", "walk"]


_NUM_BLOCKS = 18
_NUM_PROMPT_TOKENS = 12
_NUM_OUTPUT_TOKENS = {"a": 16, "b": 20, "c": 22}


@dataclass
class _Moment:
    """What a step found: blocks held by each request, cached blocks, who is where, and what happened."""

    held: dict[str, int]
    num_cached: int
    status: dict[str, RequestStatus]
    events: list[Event]


def _run() -> list[_Moment]:
    """Run three requests in a pool that is too small for all of them to their ends."""
    said: list[Event] = []
    core = KVCore(_NUM_BLOCKS, block_size=4)
    scheduler = Scheduler(core, SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=24), emit=said.append)
    requests = []
    for number, (name, num_output_tokens) in enumerate(_NUM_OUTPUT_TOKENS.items()):
        tokens = range(100 * number, 100 * number + _NUM_PROMPT_TOKENS)
        stop = StopRule(frozenset(), _NUM_PROMPT_TOKENS + num_output_tokens)
        requests.append(Request(name, tokens, SamplingParams(temperature=0), stop=stop, seed=number))
        scheduler.add(requests[-1])
    runner = NullRunner()
    moments: list[_Moment] = []
    while scheduler.has_work:
        result = runner.run(scheduler.schedule(float(len(moments))))
        held = {
            request.request_id: len(request.cache.only_table.block_ids) if request.cache else 0 for request in requests
        }
        status = {request.request_id: request.status for request in requests}
        num_cached = core.pool.num_cached
        scheduler.apply(result)
        moments.append(_Moment(held, num_cached, status, said.copy()))
        said.clear()
        audit(core)
    return moments


def preemption() -> Drawing:
    """Who holds which blocks while one of three requests is preempted and comes back."""
    moments = _run()
    notes = [(step, event) for step, moment in enumerate(moments) for event in moment.events]
    preempted = [(step, event) for step, event in notes if isinstance(event, RequestPreempted)]
    returned = [(step, event) for step, event in notes if isinstance(event, PrefixLookup) and event.after_preemption]
    (gone, went), (back, came) = preempted[0], returned[0]
    assert len(preempted) == len(returned) == 1, "one preemption is what the picture explains"
    name, cause = went.request_id.upper(), went.cause_request_id.upper()
    drawing = Drawing(
        760,
        418,
        "Preemption",
        f"Blocks held by three requests, step by step. In step {gone} request {name} gives its blocks back; in step "
        f"{back} it returns and finds {came.num_hit_tokens} of its {came.num_tokens} tokens in the cache.",
    )
    left, width, top, unit = 110, 624 / len(moments), 50, 12
    bottom = top + _NUM_BLOCKS * unit
    drawing.text(24, 34, f"the pool's {_NUM_BLOCKS} blocks, step by step", "bold")
    for row, (kind, label) in enumerate([("empty", "free"), ("cached", "cached"), ("c", "C"), ("b", "B"), ("a", "A")]):
        drawing.box(24, top + 10 + row * 24, 14, 14, kind)
        drawing.text(44, top + 22 + row * 24, label, size=12)
    for step, moment in enumerate(moments):
        x, y = left + step * width, float(bottom)
        num_free = _NUM_BLOCKS - sum(moment.held.values()) - moment.num_cached
        for kind, count in [*moment.held.items(), ("cached", moment.num_cached), ("empty", num_free)]:
            y -= count * unit
            if count:
                drawing.box(x, y, width, count * unit, kind)
        if step % 5 == 0 or step in (gone, back):
            drawing.text(
                x + width / 2,
                bottom + 15,
                str(step),
                "bold" if step in (gone, back) else "pale",
                anchor="middle",
                size=11,
            )
    rows = {
        RequestStatus.WAITING: "",
        RequestStatus.RUNNING: "runs",
        RequestStatus.PREEMPTED: "waits again",
        RequestStatus.FINISHED: "done",
    }
    for row, request_id in enumerate(_NUM_OUTPUT_TOKENS):
        y = bottom + 28 + row * 24
        drawing.text(left - 12, y + 13, request_id.upper(), "bold", anchor="end", size=12)
        for status, first, last in _spans([moment.status[request_id] for moment in moments]):
            kind = request_id if status is RequestStatus.RUNNING else "empty"
            drawing.box(left + first * width, y, (last - first) * width, 18, kind)
            drawing.text(left + (first + last) / 2 * width, y + 13, rows[status], anchor="middle", size=11)
    found, total = came.num_hit_tokens, came.num_tokens
    lines = (
        f"Step {gone}: {cause} needs a block, and none is left. {name} came last, so it gives its blocks back.",
        f"Step {back}: there is room. {name} finds {found} of its {total} tokens and computes {total - found} again.",
    )
    for row, line in enumerate(lines):
        drawing.text(24, bottom + 122 + 20 * row, line)
    return drawing


def _spans(statuses: list[RequestStatus]) -> list[tuple[RequestStatus, int, int]]:
    """Return what is the same in neighbouring steps as (status, first step, step after the last)."""
    starts = [step for step, status in enumerate(statuses) if not step or statuses[step - 1] is not status]
    return [(statuses[start], start, end) for start, end in zip(starts, [*starts[1:], len(statuses)], strict=True)]


def walk() -> Drawing:
    """The rooms of the house that a request goes through."""
    drawing = Drawing(
        760,
        376,
        "The walk of a request",
        "A request goes from the client through server and tokenizer to the engine. The engine asks the scheduler for "
        "a plan, has the runner carry it out, and applies the result; text goes back to the client.",
    )
    for x, width, name, what in (
        (24, 110, "client", "openai, curl"),
        (196, 130, "server", "checks, streams"),
        (388, 130, "tokenizer", "text and tokens"),
    ):
        _draw_room(drawing, x, 24, width, name, what)
    drawing.arrow((134, 40), (196, 40))
    drawing.arrow((196, 58), (134, 58))
    drawing.arrow((326, 40), (388, 40))
    drawing.text(540, 44, "on the event loop", "pale", size=12)
    drawing.arrow((453, 74), (453, 118), (340, 118), (340, 142))
    drawing.text(396, 112, "tokens", anchor="middle", size=12)
    drawing.arrow((230, 142), (230, 74))
    drawing.text(222, 112, "deltas", anchor="end", size=12)

    drawing.box(24, 142, 352, 214, "a")
    drawing.text(40, 166, "engine: a loop on a thread of its own", "bold")
    rooms = (
        ("plan = scheduler.schedule(now)", "scheduler", "asks kv which blocks; they are promised", "shared"),
        ("result = runner.run(plan)", "runner", "copies, computes, writes K and V, samples", "b"),
        ("scheduler.apply(result)", "scheduler", "kv commits what was promised", "shared"),
    )
    for row, (call, name, what, kind) in enumerate(rooms):
        y = 176 + row * 60
        drawing.text(40, y + 29, f"{row + 1}  {call}", "code")
        drawing.arrow((312, y + 25), (448, y + 25))
        _draw_room(drawing, 448, y, 288, name, what, kind)
    drawing.text(62, 342, "or, when run() raised: scheduler.abandon(error)", "code pale", size=11)
    return drawing


def _draw_room(drawing: Drawing, x: float, y: float, width: float, name: str, what: str, kind: str = "box") -> None:
    drawing.box(x, y, width, 50, kind)
    drawing.text(x + width / 2, y + 21, name, "bold", anchor="middle")
    drawing.text(x + width / 2, y + 39, what, "pale", anchor="middle", size=11)
