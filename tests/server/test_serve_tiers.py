"""``pagefold serve`` with a disk and a pool: restarts, kills, remotes that hang; through HTTP, and real processes."""

from __future__ import annotations

from itertools import count

import pytest
from local_server import ProcessServer, start_cli, until
from store.real_servers import NO_REDIS, REDIS_SERVER, redis_server

MODEL = "smollm2-135m"
SMALL = ("--kv-cache-memory-bytes", "64M", "--kv-offloading-size", "0.1", "--max-model-len", "1024")
PROMPT = " ".join(f"Line {number} of a long letter to nobody." for number in range(40))
PROMPTS = [f"Letter {number}. {PROMPT}" for number in range(4)]  # on a busy machine one may be late, but not all
ASKED = {"max_tokens": 8, "temperature": 0}


def disk(folder, *more):
    return (*SMALL, "--kv-disk-path", str(folder), "--kv-disk-size", "0.3", *more)


def by_tier(usage):
    return usage["prompt_tokens_details"].get("cached_tokens_by_tier", {})


def ask_all(server):
    """Return what follows each prompt, and how many tokens came from the disk."""
    answers = [server.complete(prompt, **ASKED) for prompt in PROMPTS]
    num_from_disk = sum(by_tier(answer["usage"]).get("disk", 0) for answer in answers)
    return [answer["choices"][0]["text"] for answer in answers], num_from_disk


def num_written(server):
    return server.metric("pagefold:tier_blocks_written_total", "kept")


@pytest.mark.long
def test_what_was_cached_is_found_after_a_restart(tmp_path):
    server = ProcessServer(MODEL, *disk(tmp_path / "kv"))
    try:
        texts = ask_all(server)[0]
        server.process.terminate()  # what is cached is written
        assert server.process.wait(60) == 0
        assert "disk       " in server.output()
    finally:
        server.close()
    again = ProcessServer(MODEL, *disk(tmp_path / "kv"))
    try:
        texts_again, num_from_disk = ask_all(again)
        assert texts_again == texts
        assert num_from_disk
        assert again.metric("vllm:prompt_tokens_by_source_total", "external_kv_transfer") > 0
        answer = again.complete(PROMPTS[-1], **ASKED)  # now it is on the device
        assert not by_tier(answer["usage"])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    finally:
        again.close()


@pytest.mark.long
def test_a_killed_server_has_lost_little(tmp_path):
    flags = disk(tmp_path / "kv", "--kv-write-policy", "write_through")
    server = ProcessServer(MODEL, *flags)
    try:
        texts = ask_all(server)[0]
        until(lambda: num_written(server) >= 16 * len(PROMPTS), "the blocks are written")
        server.process.kill()
        server.process.wait()
    finally:
        server.close()
    again = ProcessServer(MODEL, *flags)
    try:
        texts_again, num_from_disk = ask_all(again)
        assert texts_again == texts
        assert num_from_disk
    finally:
        again.close()


@pytest.mark.long
def test_a_prompt_larger_than_the_budget_is_streamed(smol):
    long_prompt = " ".join(PROMPTS)
    expected = smol.complete(long_prompt, **ASKED)["choices"][0]["text"]
    small = ("--kv-cache-memory-bytes", "16M", "--kv-offloading-size", "0.2", "--max-model-len", "4096")
    server = ProcessServer(MODEL, *small, "--allow-streaming")
    try:
        for _ in range(2):
            answer = server.complete(long_prompt, **ASKED)
            assert answer["choices"][0]["text"] == expected
        assert by_tier(answer["usage"])["host"] > 1000
        assert server.metric("pagefold:requests_streamed_total") == 2
        assert server.complete("A short one.", **ASKED)["choices"]
    finally:
        server.close()


@pytest.mark.long
def test_one_server_a_folder(tmp_path):
    server = ProcessServer(MODEL, *disk(tmp_path / "kv"))
    try:
        second = start_cli("serve", MODEL, "--port", "0", *disk(tmp_path / "kv"))
        said, _ = second.communicate(timeout=60)
        assert second.returncode not in (0, None)
        assert str(server.process.pid) in said
        assert "Traceback" not in said
    finally:
        server.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        pytest.param(("--kv-disk-path", "/proc/nowhere"), "/proc/nowhere", marks=pytest.mark.long),
        pytest.param(
            ("--kv-disk-path", "{folder}", "--kv-disk-size", "1e9"), "bytes less than", marks=pytest.mark.long
        ),
        pytest.param(
            ("--kv-disk-path", "{folder}", "--kv-disk-size", "0"), "kv_disk_size is 0", marks=pytest.mark.long
        ),
        pytest.param(("--kv-disk-path", "{folder}", "--kv-disk-size", "0.001"), "small", marks=pytest.mark.long),
        pytest.param(("--kv-remote-url", "ftp://127.0.0.1"), "no remote store", marks=pytest.mark.long),
        pytest.param(("--kv-remote-required",), "there is no kv_remote_url", marks=pytest.mark.long),
        (("--kv-remote-url", "redis://:secret@127.0.0.1:1", "--kv-remote-required"), "127.0.0.1:1"),
        pytest.param(
            ("--kv-write-policy", "sometimes", "--kv-disk-path", "{folder}"),
            "write_through_selective",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--kv-disk-path", "{folder}", "--record-trace", "{folder}/trace"), "--record-trace", marks=pytest.mark.long
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(tiny_chat_model, tmp_path, flags, told):
    flags = [flag.format(folder=tmp_path) for flag in flags]
    process = start_cli("serve", str(tiny_chat_model), "--port", "0", *flags)
    said, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert told in said, said
    assert "Traceback" not in said
    assert "secret" not in said


@pytest.mark.long
@pytest.mark.skipif(REDIS_SERVER is None, reason=NO_REDIS)
def test_a_pool_that_hangs_or_is_not_there_holds_up_nobody(tmp_path):
    with redis_server(tmp_path) as redis:
        redis.kill()
        flags = (*SMALL, "--kv-remote-url", f"redis://127.0.0.1:{redis.port}", "--kv-write-policy", "write_through")
        server = ProcessServer(MODEL, *flags)  # it starts without
        try:
            use_pool(server, redis)
        finally:
            server.close()


def use_pool(server, redis):
    first = server.complete(PROMPT, **ASKED)
    redis.start()
    text = first["choices"][0]["text"]

    numbers = count()

    def is_written():
        server.complete(f"Letter {next(numbers)}. " + PROMPT, **ASKED)
        return num_written(server) > 0

    until(is_written, "the pool is used once it answers")
    with redis.frozen():
        for number in range(3):
            answer = server.complete(PROMPT, cache_salt=str(number), **ASKED)
            assert answer["choices"][0]["text"] == text
