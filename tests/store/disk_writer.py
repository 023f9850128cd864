"""A process that puts, gets and deletes blocks until it is killed: python disk_writer.py FOLDER LIMIT SEED [HOLD]."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from random import Random

from disk_blocks import count, frame_format, get, path_of, put

from pagefold.store.disk import DiskStore

NUM_PATHS, PATH = 60, 12
BLOCK_BYTES = 5000


def main() -> None:
    folder, limit, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = Random(seed)
    store = DiskStore(folder, limit, frame_format(BLOCK_BYTES))
    print("open", flush=True)
    if len(sys.argv) > 4:
        time.sleep(600)
    paths = [path_of(PATH, of=of, block_bytes=BLOCK_BYTES) for of in range(NUM_PATHS)]
    while True:
        path = rng.choice(paths)
        what = rng.random()
        if what < 0.7:
            num = put(store, path[: rng.randrange(1, PATH + 1)])
            print(f"put {num}", flush=True)
        elif what < 0.95:
            get(store, path)
        elif what < 0.995:
            store.delete([block.name.digest for block in path[rng.randrange(PATH) :]])
        else:
            store.clear()
        assert count(store, path) <= PATH


if __name__ == "__main__":
    main()
