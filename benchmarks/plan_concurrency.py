"""Concurrency as planned against concurrency as reached: the same memory, the same workload, a real server.

A tiny random Llama is served by this process over HTTP with a small KV budget; ``pagefold bench``'s load sends requests
so that some always wait, and the server's requests running are counted after every step. The plan is made beforehand,
from the model's config.json and the same flags. Asked: within 2 % of each other, for each workload.

    python benchmarks/plan_concurrency.py [--requests N] [--json FILE]
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
import time
from pathlib import Path

import uvicorn
from report import Row, machine, parser, print_report

from pagefold.bench import LoadSettings, Prompt, run_load
from pagefold.bench.client import Client
from pagefold.config import EngineConfig, ServerConfig, cache_dir
from pagefold.engine.build import build_engine
from pagefold.engine.engine_thread import EngineThread
from pagefold.engine.planning import plan_engine
from pagefold.events import Event, StepApplied, fan_out
from pagefold.hub.catalog import resolve
from pagefold.observe.ledger import Ledger
from pagefold.observe.metrics import Metrics
from pagefold.plan import Device, PlanSettings, Question, Workload, draw_lengths, find_model, make_plan
from pagefold.server import create_app

ASKED = 0.02
SETTINGS = {"dtype": "float32", "max_num_seqs": 128, "max_num_batched_tokens": 512, "max_model_len": 1024}
BUDGET = 2**20 * 24
WORKLOADS = (("100", "60"), ("40-200", "20-80"), ("300", "30"))
PREFIX = 96


def tiny_model(folder: Path, max_positions: int = 2048) -> Path:
    """Write a random Llama of two layers with the built-in model's tokenizer.

    It is wide, so that a step takes some ten milliseconds: with shorter ones the client, in this same process, would
    not keep requests waiting.
    """
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in resolve("smollm2-135m", cache_dir()).iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, folder)
    return folder


class Server:
    """An engine behind HTTP in this process; counts who runs after each step.

    Args:
        config: of the engine.
        door: of the server.
    """

    def __init__(self, config: EngineConfig, door: ServerConfig | None = None) -> None:
        self.running: list[tuple[int, int]] = []
        metrics, self.ledger = Metrics("served"), Ledger()
        emit = fan_out(metrics.emit, self.ledger)

        def watch(event: Event) -> None:
            emit(event)
            if isinstance(event, StepApplied):
                self.running.append((event.num_running, event.num_waiting))

        self.client = EngineThread(build_engine(plan_engine(config), emit=watch))
        self.client.start()
        app = create_app(
            self.client, model_name="served", config=door or ServerConfig(), metrics=metrics, ledger=self.ledger
        )
        settings = uvicorn.Config(app, lifespan="off", log_config=None, ws="none", access_log=False)
        self._server = uvicorn.Server(settings)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True).start()
        while not self._server.started:
            time.sleep(0.01)

    def reached(self) -> float:
        """Return the mean number of requests running, over the later steps after which some waited."""
        held = [running for running, waiting in self.running if waiting]
        return sum(held[len(held) // 3 :]) / len(held[len(held) // 3 :])

    def close(self) -> None:
        """Stop serving."""
        self.client.drain(0.0)
        self._server.should_exit = True


def prompts_of(workload: Workload, num_requests: int) -> list[Prompt]:
    """Return prompts of exactly so many tokens: a word that is one token, after a number that nobody shares."""
    made = []
    for index in range(num_requests):
        lengths = workload.lengths[(index * 7) % len(workload.lengths)]
        own = " ".join("the" if index >> bit & 1 else "and" for bit in range(14))
        shared = " of" * workload.prefix_len
        made.append(
            Prompt((shared + " " + own + " of" * (lengths.prompt - 14 - workload.prefix_len)).strip(), lengths.output)
        )
    return made


async def send(url: str, workload: Workload, num_requests: int, at_once: int) -> None:
    """Send the workload, so many requests at once."""
    client = Client(url, ignore_eos=True)
    await client.find_model()
    load = LoadSettings(max_concurrency=at_once)
    result = await run_load(client, prompts_of(workload, num_requests), load, on_done=lambda _: None)
    await client.close()
    failed = [record.error for record in result.records if record.error]
    assert not failed, failed[0]


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, default=400, help="of each workload")
    args = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder))
        shape = find_model(str(model))
        for prefix_len, (input_len, output_len) in [(0, each) for each in WORKLOADS] + [(PREFIX, ("200", "60"))]:
            lengths = draw_lengths(input_len, output_len)
            workload = Workload(name=f"{input_len} in, {output_len} out", lengths=lengths, prefix_len=prefix_len)
            settings = PlanSettings(kv_cache_memory_bytes=BUDGET, **SETTINGS)
            device = Device(name="cpu", memory_bytes=2**33, is_cpu=True)
            plan = make_plan(Question(shape=shape, device=device, settings=settings, workload=workload))
            server = Server(EngineConfig(model=str(model), kv_cache_memory_bytes=BUDGET, **SETTINGS))
            try:
                at_once = int(2 * plan.load.reached_shared.peak) + 8
                asyncio.run(send(server.url, workload, args.requests, at_once))
                reached = server.reached()
            finally:
                server.close()
            planned = plan.load.reached_shared.mean
            away = planned / reached - 1
            shared = f", {prefix_len} of them shared" if prefix_len else ""
            rows.append(
                Row(
                    f"requests running, {workload.name}{shared}",
                    asked=f"{planned:.2f} planned, within {ASKED:.0%}",
                    got=f"{reached:.2f} ({away:+.1%})",
                    ok=abs(away) <= ASKED,
                    values={"planned": planned, "reached": reached, "at_full_length": plan.load.full_shared},
                )
            )
            rows.append(Row("  each counted at its full length", "", f"{plan.load.full_shared:.2f}"))
    print_report("plan_concurrency", rows, machine(), args.json)


if __name__ == "__main__":
    main()
