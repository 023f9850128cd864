"""The connector in a real vLLM: the same outputs, blocks that come back as they were, or are computed anew.

In each version that is known; one that is not there is skipped (``vllm_environments.py``).
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest
from vllm_environments import VERSIONS, python_of, variables

SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 30,
    "max_num_seqs": 8,
    "disable_log_stats": False,
}
NUM_CONVERSATIONS, NUM_TOKENS, NUM_NEW, NUM_OUTPUT = 5, 150, 20, 12

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def transfer(**more: object) -> dict[str, object]:
    return {
        "kv_connector": "PagefoldConnector",
        "kv_connector_module_path": "pagefold.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_bytes": "300MiB", "verifies_restored": True, **more},
    }


class VLLM:
    """A vLLM of a version in a process of its own, which writes into a folder."""

    def __init__(self, version: str, model: Path, folder: Path, **settings: object) -> None:
        self.log = folder / "log"
        lent = folder / "lent"
        lent.mkdir(exist_ok=True)
        with self.log.open("a") as stderr:
            self.process = subprocess.Popen(
                [
                    str(python_of(version)),
                    str(Path(__file__).with_name("drive_vllm_connector.py")),
                    json.dumps({"model": str(model), "settings": SETTINGS | settings}),
                ],
                env=variables(lent),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.began = self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        return json.loads(line)

    def ask(self, **command: object) -> dict:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()

    def counts(self) -> dict[str, float]:
        return self.ask(counts=True)["counts"]

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        return self.ask(prompts=prompts, num_output_tokens=NUM_OUTPUT)["token_ids"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(900)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def rounds(num: int, outputs: list[list[list[int]]] | None = None):
    """Yield the prompts of each round of conversations that return; what was answered is sent back."""
    rng = random.Random("connector")
    prompts = [[rng.randrange(49_000) for _ in range(NUM_TOKENS)] for _ in range(NUM_CONVERSATIONS)]
    for at in range(num):
        answered = yield [list(prompt) for prompt in prompts]
        answered = outputs[at] if outputs else answered
        for prompt, answer in zip(prompts, answered, strict=True):
            prompt.extend(answer)
            prompt.extend(rng.randrange(49_000) for _ in range(NUM_NEW))


def story(vllm: VLLM, num: int) -> list[list[list[int]]]:
    outputs = []
    asked = rounds(num)
    prompts = next(asked)
    while True:
        outputs.append(vllm.generate(prompts))
        try:
            prompts = asked.send(outputs[-1])
        except StopIteration:
            return outputs


@pytest.fixture(scope="module", params=VERSIONS)
def version(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(smollm2, version, tmp_path_factory) -> list[list[list[int]]]:
    """What vLLM says without the connector, with room for everything."""
    vllm = VLLM(version, smollm2, tmp_path_factory.mktemp("alone"), num_gpu_blocks_override=200)
    try:
        return story(vllm, 3)
    finally:
        vllm.close()


def test_outputs_are_the_same_through_returns_damage_preemption_and_resets(smollm2, version, alone, tmp_path):
    vllm = VLLM(version, smollm2, tmp_path, kv_transfer_config=transfer())
    try:
        assert vllm.began == {"ready": version}
        assert story(vllm, 3) == alone
        first = vllm.counts()
        assert first["num_stored"] > 0
        assert first["num_loaded"] > 0
        assert (first["num_damaged"], first["differing_bytes"]) == (0, 0)
        assert vllm.ask(damage=True)["num"] > 0
        assert story(vllm, 3) == alone
        damaged = vllm.counts()
        assert damaged["num_damaged"] > 0
        assert damaged["differing_bytes"] == 0
        assert story(vllm, 3) == alone
        assert vllm.counts()["num_damaged"] == damaged["num_damaged"], "what was damaged is found again"
        # All at once: there is not room for the outputs of all, and some are preempted.
        many = [prompt for prompts in [next(rounds(1))] for prompt in prompts] * 2
        assert vllm.generate(many) == alone[0] * 2
        assert vllm.ask(reset=True) == {"ok": True}
        before = vllm.counts()
        assert vllm.ask(counts=True)["held"] == 0
        assert story(vllm, 1) == alone[:1]
        assert vllm.counts()["num_loaded"] == before["num_loaded"]
    finally:
        vllm.close()


def test_a_second_start_finds_what_is_on_the_disk(smollm2, version, alone, tmp_path):
    more = transfer(disk_path=str(tmp_path / "kv"), disk_bytes="1GiB")
    fetched = []
    for _ in range(2):
        vllm = VLLM(version, smollm2, tmp_path, kv_transfer_config=more)
        try:
            assert vllm.began == {"ready": version}
            assert story(vllm, 2) == alone[:2]
            counts = vllm.counts()
            fetched.append(counts["num_fetched"])
            assert counts["num_damaged"] == counts["differing_bytes"] == 0
        finally:
            vllm.close()
    assert fetched[0] == 0
    assert fetched[1] > 0


def test_what_cannot_work_is_refused_at_the_start(smollm2, version, tmp_path):
    wrong = transfer() | {"kv_load_failure_policy": "fail"}
    vllm = VLLM(version, smollm2, tmp_path, kv_transfer_config=wrong)
    vllm.close()
    assert "kv_load_failure_policy" in vllm.began["error"] + vllm.log.read_text()
