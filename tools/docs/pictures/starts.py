"""What the planner says of starts of vLLM, over what their logs have: a dot each, with its range."""

from __future__ import annotations

import json
from pathlib import Path

from svg import Drawing

from pagefold.plan import PlanSettings, find_device, find_model
from pagefold.plan.memory import plan_memory

__all__ = ["starts"]

_LOGS = Path(__file__).parents[3] / "tests" / "plan" / "start_logs.json"
_GIB = 2**30
_LEFT, _RIGHT, _TOP, _ROW = 290, 880, 76, 24
_LEAST, _MOST = 0.92, 1.08


def _at(ratio: float) -> float:
    return _LEFT + (min(_MOST, max(_LEAST, ratio)) - _LEAST) / (_MOST - _LEAST) * (_RIGHT - _LEFT)


def starts() -> Drawing:
    """Return KV bytes of every logged start, planned over logged."""
    rows = []
    for row in json.loads(_LOGS.read_text(encoding="utf-8")):
        settings = PlanSettings(engine=row["engine"], **row["settings"])
        kv = plan_memory(find_model(row["model"]), find_device(row["device"]), settings).tightest.kv
        logged = row["gib"]["kv"] * _GIB
        rows.append((row["model"], kv.likely / logged, kv.low / logged, kv.high / logged))
    rows.sort(key=lambda row: abs(row[1] - 1), reverse=True)
    bottom = _TOP + len(rows) * _ROW
    drawing = Drawing(
        940,
        bottom + 60,
        "KV bytes of starts of vLLM, planned over logged",
        f"{len(rows)} public start logs. The planner's likely number lies between "
        f"{min(row[1] for row in rows):.3f} and {max(row[1] for row in rows):.3f} of what was logged; "
        f"the worst is {rows[0][0]}. Each range reaches over what was logged.",
    )
    drawing.text(20, 32, "KV bytes of starts of vLLM, planned over logged", "bold", size=15)
    drawing.text(20, 52, "box: from all as unfavourable to all as favourable as it may be; bar: what is likely", "pale")
    drawing.box(_at(0.96), _TOP - 8, _at(1.04) - _at(0.96), bottom - _TOP + 12, "empty")
    for tick in (0.92, 0.96, 1.0, 1.04, 1.08):
        drawing.text(_at(tick), bottom + 24, f"{tick:.2f}", "pale", anchor="middle")
    for index, (model, likely, low, high) in enumerate(rows):
        y = _TOP + index * _ROW
        drawing.text(_LEFT - 12, y + 13, model.rpartition("/")[2], anchor="end")
        drawing.box(_at(low), y + 3, _at(high) - _at(low), 12, "a")
        drawing.box(_at(likely) - 2, y, 4, 18, "b strong")
        drawing.text(_RIGHT + 8, y + 13, f"{likely:.3f}")
    drawing.box(_at(1.0) - 0.5, _TOP - 8, 1, bottom - _TOP + 12, "box")
    drawing.text(20, bottom + 48, "grey: 0.96 to 1.04, what is asked", "pale")
    return drawing
