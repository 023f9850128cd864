"""Runs a real vLLM with the connector, in vLLM's own environment: a line of JSON in, a line of JSON out.

    python drive_vllm_connector.py '{"model": FOLDER, "settings": {...}}'

In: ``{"prompts": [[token ids], ...], "num_output_tokens": n}``, ``{"damage": true}``, ``{"reset": true}`` or
``{"counts": true}``. The first line out is ``{"ready": VERSION}``, of vLLM.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the scheduler's side can be looked into
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the worker runs what this file says


def damage(_worker: object) -> int:
    """Turn a bit in every block of the host's memory; how many there are."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    blocks = get_kv_transfer_group()._worker.arena.blocks
    blocks[:, 5] ^= 1
    return len(blocks)


def main() -> None:
    """Start, and carry out one command after another until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(what: dict[str, object]) -> None:
        replies.write(json.dumps(what) + "\n")
        replies.flush()

    from vllm import LLM, SamplingParams
    from vllm import __version__ as vllm_version

    asked = json.loads(sys.argv[1])
    try:
        llm = LLM(asked["model"], **asked["settings"])
    except Exception as error:  # noqa: BLE001 - the test looks at it
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    reply({"ready": vllm_version})
    for line in sys.stdin:
        command = json.loads(line)
        if "prompts" in command:
            how = SamplingParams(
                temperature=0.0, max_tokens=command["num_output_tokens"], ignore_eos=True, detokenize=False
            )
            prompts = [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
            outputs = llm.generate(prompts, how, use_tqdm=False)
            reply({"token_ids": [list(output.outputs[0].token_ids) for output in outputs]})
        elif "damage" in command:
            reply({"num": llm.collective_rpc(damage)[0]})
        elif "reset" in command:
            reply({"ok": llm.reset_prefix_cache(reset_connector=True)})
        else:
            reply(
                {"counts": {**vars(connector._planner.counts), **connector._stats}, "held": connector._planner.num_held}
            )


if __name__ == "__main__":
    main()
