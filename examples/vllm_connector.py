"""A conversation that returns, inside vLLM: Pagefold keeps its KV in the host's memory and on a disk.

    pip install 'pagefold[vllm]'    # into vLLM's own environment
    python examples/vllm_connector.py MODEL --disk vllm-kv

Asks about a text, has vLLM forget its own prefix cache, as if others had taken the room, and asks again. Run it twice:
then the first question finds on the disk what the run before has left there.
"""

from __future__ import annotations

import argparse
import sys

TEXT = "You answer questions about a garden in one short sentence. What grows in it:\n" + "\n".join(
    f"- bed {bed}: {('beans', 'garlic', 'kale', 'peas')[bed % 4]}, sown in week {10 + bed * 7 % 20}, "
    f"watered every {bed % 3 + 1} days"
    for bed in range(1, 25)
)
QUESTIONS = ("What grows in bed 4?", "And when was it sown?")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="default: %(default)s")
    parser.add_argument("--disk", default="vllm-kv", metavar="DIR", help="where blocks are kept (default: %(default)s)")
    args = parser.parse_args()
    try:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - --help needs none
    except ImportError as missing:
        print(f"error: {missing}; run this in vLLM's own environment", file=sys.stderr)
        return 1

    llm = LLM(
        args.model,
        max_model_len=2048,
        enforce_eager=True,  # it starts sooner so
        kv_transfer_config={
            "kv_connector": "PagefoldConnector",
            "kv_connector_module_path": "pagefold.integrations.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_bytes": "1GiB", "disk_path": args.disk, "disk_bytes": "2GiB"},
        },
    )
    how = SamplingParams(temperature=0, max_tokens=32)
    messages = [{"role": "system", "content": TEXT}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (said,) = llm.chat(messages, how, use_tqdm=False)
        answer = said.outputs[0].text.strip()
        messages.append({"role": "assistant", "content": answer})
        print(f"{question} {answer}")
        print(f"    [{len(said.prompt_token_ids)} prompt tokens, {said.num_cached_tokens} found]", flush=True)
        llm.reset_prefix_cache()  # vLLM's own alone: what is found from here on is Pagefold's
    return 0


if __name__ == "__main__":  # vLLM starts processes
    sys.exit(main())
