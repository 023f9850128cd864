"""Bodies that schemathesis makes out of the server's own description: such as fit it, and such as do not."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import schemathesis
from attack import ADMIN_KEY
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from judge import complaint
from schemathesis import GenerationMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from attack import Attack

_MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


def send_described(attack: Attack, url: str, number: int) -> None:
    """Send what an attack asks for of the kind, of every operation that has something to vary."""
    schema = schemathesis.openapi.from_dict(attack.description)
    operations = [result.ok() for result in schema.get_all_operations()]
    varied = [one for one in operations if one.body or one.path_parameters]
    kinds = [(operation, mode) for operation in varied for mode in _MODES]
    for place, (operation, mode) in enumerate(kinds):
        num_cases = attack.num_described * (place + 1) // len(kinds) - attack.num_described * place // len(kinds)
        if num_cases:
            some = settings(
                max_examples=num_cases,
                phases=[Phase.generate],
                database=None,
                suppress_health_check=list(HealthCheck),
                deadline=None,
            )
            cases = operation.as_strategy(generation_mode=mode)
            send = _sender(attack, url, f"seed {number}, described {mode.value}")
            with suppress(Unsatisfiable):  # nothing that this operation forbids can be made
                some(seed(number)(given(case=cases)(send)))()


def _sender(attack: Attack, url: str, name: str) -> Callable[[schemathesis.Case], None]:
    def run(case: schemathesis.Case) -> None:
        def send() -> schemathesis.Response:
            return case.call(base_url=url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=60)

        begin = time.time()
        answer = send()
        kind = ",".join(answer.headers.get("content-type", []))
        wrong = complaint(answer.status_code, kind, answer.text)
        attack.note(f"{name}: {case.as_curl_command()[:500]}", begin, [answer.status_code], wrong, send)

    return run
