"""OpenVINO GenAI's ContinuousBatchingPipeline.

Settings: ``scheduler``, ``properties`` (of the device) and, if any, ``generation``.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import openvino
import openvino_genai
from driver import Emit, Generate, serve


def start(model: str, settings: dict[str, Any]) -> Generate:
    """Return an engine that is ready."""
    scheduler = openvino_genai.SchedulerConfig()
    for name, value in settings["scheduler"].items():
        setattr(scheduler, name, value)
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings["properties"])
    names = count()

    def generate(prompts: list[list[int]], num_output_tokens: int, emit: Emit) -> None:
        how = openvino_genai.GenerationConfig()
        how.max_new_tokens = num_output_tokens
        how.ignore_eos = True
        how.do_sample = False
        for name, value in settings.get("generation", {}).items():
            setattr(how, name, value)
        handles = [
            pipeline.add_request(next(names), openvino.Tensor(np.array([prompt], dtype=np.int64)), how)
            for prompt in prompts
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        emit(index, output.generated_ids)

    return generate


if __name__ == "__main__":
    serve(start)
