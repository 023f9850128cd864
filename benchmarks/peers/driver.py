"""What every engine's driver speaks: a line of JSON in, a line of JSON out.

    python drive_ENGINE.py '{"model": FOLDER, "settings": {...}}'

In: ``{"prompts": [[token ids], ...], "num_output_tokens": n}``, all of them at once. Out: ``{"times": ...,
"token_ids": ...}``, for each prompt one entry a token: seconds from when the command was read until it was there, and
its id; or ``{"error": ...}``. The first line out is ``{"ready": true}``. This file needs nothing but the standard
library, since it runs in each peer's own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

__all__ = ["Emit", "Generate", "serve"]

Emit: TypeAlias = Callable[[int, Iterable[int]], None]
"""Called with a prompt's index and the tokens that are new."""

Generate: TypeAlias = Callable[[list[list[int]], int, Emit], None]
"""Complete all prompts greedily, each by exactly so many tokens, end-of-text or not."""


def serve(start: Callable[[str, dict[str, Any]], Generate]) -> None:
    """Start an engine and run one command after another until stdin ends."""
    # Libraries print on stdout: that goes to stderr, and only replies to where stdout led.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(what: dict[str, object]) -> None:
        replies.write(json.dumps(what) + "\n")
        replies.flush()

    asked = json.loads(sys.argv[1])
    generate = start(asked["model"], asked["settings"])
    reply({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        begin = time.perf_counter()
        times: list[list[float]] = [[] for _ in command["prompts"]]
        token_ids: list[list[int]] = [[] for _ in command["prompts"]]

        def emit(
            index: int,
            new: Iterable[int],
            begin: float = begin,
            times: list[list[float]] = times,
            token_ids: list[list[int]] = token_ids,
        ) -> None:
            now = time.perf_counter() - begin
            for token_id in new:
                times[index].append(now)
                token_ids[index].append(int(token_id))

        try:
            generate(command["prompts"], command["num_output_tokens"], emit)
        except Exception as error:  # noqa: BLE001 - whatever it is, the benchmark reports it and goes on
            reply({"error": f"{type(error).__name__}: {error}"})
        else:
            reply({"times": times, "token_ids": token_ids})
