"""Measure the order of samples and the loader, and Megatron-core's dataset with torch's loader.

    python -m bench reading --documents 200000 --tokens 200e6 --json

Both read the same token files, in processor time of one process: the loader without threads, so that what it does is
counted. Ours also hashes every sample. Of the order the time is given to build and write it, and to read it again from
where it was written. Ours then compares each byte with its checksums. Megatron-core's only maps its files, so a second
peer reads their bytes too, and adds them up. `core_data.py` has the other side.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench.data.data_order import make_pair, sizes_of
from bench.runner import Result, compare, comparison, in_folder, share
from megatron.data.token_file import TokenFile

PEER, CHECKED = "Megatron-core", "Megatron-core, each byte read"
BATCH = 8


def fill(file: TokenFile, prefix: Path) -> None:
    """Random words instead of the holes of a sparse file."""
    generator = np.random.default_rng(0)
    with open(f"{prefix}.bin", "r+b") as out:
        for first in range(0, file.tokens, 1 << 22):
            count = min(1 << 22, file.tokens - first)
            out.write(generator.integers(1, 50000, count, dtype=np.uint16).tobytes())


def ours(prefix: Path, length: int, samples: int, cache: Path, batches: int) -> dict[str, float]:
    """Processor seconds to build the order, to load it, and to read the batches."""
    from megatron.config import resolve
    from megatron.data.loader import build_loader

    config = resolve({
        "model": {"layers": "attention/mlp", "hidden_size": 32, "attention": {"heads": 2}, "vocab_size": 50304},
        "training": {
            "steps": samples // BATCH,
            "sequence_length": length,
            "micro_batch_size": BATCH,
            "global_batch_size": BATCH,
        },
        "data": {"train": str(prefix), "cache": str(cache), "workers": 0},
    })
    found: dict[str, float] = {}
    loader = None
    build_loader(config, data_rank=0, data_ranks=1).close()  # examines the file: once, however many runs read it
    for entry in [each for each in cache.glob("pythia-*") if each.is_dir()]:
        shutil.rmtree(entry)
    for name in ("build", "load"):
        begin = time.process_time()
        loader = build_loader(config, data_rank=0, data_ranks=1)
        found[name] = time.process_time() - begin
    assert loader is not None
    loader.step(0)
    begin = time.process_time()
    for step in range(1, batches + 1):
        loader.step(step)
    found["read"] = time.process_time() - begin
    return found


def theirs(prefix: Path, length: int, samples: int, cache: Path, batches: int) -> dict[str, float]:
    start = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import core_data; core_data.main()"
    command = [sys.executable, "-c", start, str(prefix), "--sequence-length", str(length), "--samples", str(samples)]
    command += ["--cache", str(cache), "--batches", str(batches), "--batch", str(BATCH)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cache)
    if done.returncode:
        raise RuntimeError(f"{PEER}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


@in_folder
def measure(given: argparse.Namespace, folder: Path) -> Result:
    prefix, length = folder / "corpus", given.sequence_length
    file = make_pair(prefix, sizes_of(int(given.documents), int(given.tokens)))
    if given.batches:
        fill(file, prefix)
    # a hundredth less than the epochs: ours asks for `data.margin` more, and both shall shuffle the same number of them
    samples = given.epochs * (file.tokens - 1) * 99 // 100 // length // BATCH * BATCH
    rounds: dict[str, list[dict[str, float]]] = {"ours": [], PEER: []}
    for number in range(given.rounds):
        for name, way in (("ours", ours), (PEER, theirs)):
            cache = folder / f"{number}-{name}"
            cache.mkdir()
            rounds[name].append(way(prefix, length, samples, cache, given.batches))
            shutil.rmtree(cache)

    def seconds(part: str) -> dict[str, list[float]]:
        return {name: [each[part] for each in found] for name, found in rounds.items()}

    load = {**seconds("load"), CHECKED: [each["checked"] for each in rounds[PEER]]}
    size = f"{file.tokens / 1e6:,.0f} M tokens, {given.documents:,.0f} documents, {samples:,} samples of {length}"
    made = compare(f"build the order: {size}", "s", seconds("build")) + compare("load it again", "s", load)
    if given.batches:
        tokens = given.batches * BATCH * length
        made += compare(f"read batches of {BATCH} x {length}", "tokens/s", seconds("read"), tokens)
    return comparison(made)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=float, default=2e5)
    parser.add_argument("--tokens", type=float, default=1e8)
    parser.add_argument("--epochs", type=int, default=3, help="that are asked for")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=400, help="that are read (0: the .bin stays empty)")
    share(parser, "--rounds")
