"""Runs token lists through a core with windows, as a request would, so that landmarks come to be."""

from array import array

from pagefold.kv import KEEP_ALL, KeepRule, KVCore, audit

__all__ = ["RULES", "SIZE", "WINDOW", "a_core_with_landmarks", "packed", "run", "text"]

SIZE = 4
WINDOW = 8
RULES = (KEEP_ALL, KeepRule(WINDOW))


def packed(tokens):
    return array("i", tokens).tobytes()


def text(name, num_tokens):
    return [1000 * (1 + "SABCDEU".index(name)) + at for at in range(num_tokens)]


def run(core, tokens, message_ends=(), chunk=8, *, is_return=False):
    """Compute ``tokens`` as a request would, and let go. Return how many of them were found."""
    hit = core.match(b"", packed(tokens), len(tokens) - 1)
    cache, start = core.acquire(hit, message_ends, is_return=is_return)
    num_found = start
    while start < len(tokens):
        end = min(len(tokens), start + chunk)
        assert core.extend(cache, start, end)
        promise = core.publishing.promise(cache, packed(tokens), end)
        if promise is not None:
            core.publishing.commit(promise)
        core.moves.copies_done(core.moves.take_copies())
        core.moves.host_done(core.moves.take_host_ops())
        core.trim(cache, end)
        audit(core)
        start = end
    core.release(cache)
    audit(core)
    return num_found


def a_core_with_landmarks():
    """Two conversations that part behind 40 tokens."""
    core = KVCore(100, block_size=SIZE, rules=RULES)
    for name in "AB":
        run(core, text("S", 40) + text(name, 24), message_ends=(20, 40, 64))
    return core
