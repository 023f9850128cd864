"""AloneOutputs: what an engine says of each prompt alone, to hold to it what it says in company."""

from __future__ import annotations

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.sampling import SamplingParams


class AloneOutputs:
    """What an engine says of each prompt alone: in one chunk, with nothing cached."""

    smallest_gap = float("inf")  # equal to the bit needs no gap

    def __init__(self, folder, num_outputs, **settings):
        config = EngineConfig(
            model=str(folder),
            kv_cache_memory_bytes=2**26,
            max_num_batched_tokens=2**16,
            enable_prefix_caching=False,
            **{"dtype": "float32"} | settings,
        )
        self._engine = build_engine(plan_engine(config))
        self._num_outputs = num_outputs
        self._eos = frozenset(self._engine.limits.eos_token_ids)
        self._outputs = {}

    def of(self, prompt, *, ignore_eos=True):
        key = tuple(prompt)
        if key not in self._outputs:
            how = SamplingParams(temperature=0.0, max_tokens=self._num_outputs, ignore_eos=True)
            self._engine.add("alone", prompt, how)
            output = []
            while self._engine.has_work:
                for delta in self._engine.step():
                    output += delta.token_ids
            self._outputs[key] = output
        output = self._outputs[key]
        ends = [] if ignore_eos else [at for at, token_id in enumerate(output) if token_id in self._eos]
        return output[: ends[0] + 1] if ends else output
