"""Measure time and memory of GPT-NeoX's sample order for a large corpus.

    python -m bench data-order --documents 200000000 --tokens 300e9 --sequence-length 2048 --samples 146432000

No tokens are written: the .bin is a sparse file. The index (12 bytes per document) and the cache (8 bytes per document
and sample or so) need real room in --folder.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.runner import Result
from megatron.data.order.blend import Blend
from megatron.data.order.cache import examine_once
from megatron.data.order.pythia import PythiaOrder
from megatron.data.token_file import TokenFile, write_index

T = TypeVar("T")


def sizes_of(documents: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Log-normal document sizes, int32, with about that number of tokens in all."""
    random = np.random.default_rng(seed)
    sizes = np.empty(documents, np.int32)
    mean = tokens / documents
    for first in range(0, documents, 1 << 22):
        part = sizes[first : first + (1 << 22)]
        part[:] = np.clip(random.lognormal(np.log(mean) - 0.72, 1.2, len(part)), 0, 2**31 - 1)
    return sizes


def make_pair(prefix: Path, sizes: np.ndarray) -> TokenFile:
    """A pair with an index of these sizes and a .bin without content."""
    with open(f"{prefix}.idx", "wb") as file:
        write_index(file, sizes, np.dtype(np.uint16))
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(sizes.sum(dtype=np.int64)) * 2)
    return TokenFile(prefix)


def timed(action: Callable[[], T]) -> tuple[tuple[float, float], T]:
    """Wall seconds and processor seconds of an action, and its result."""
    begin, used = time.perf_counter(), time.process_time()
    result = action()
    return (time.perf_counter() - begin, time.process_time() - used), result


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=float, default=2e7)
    parser.add_argument("--tokens", type=float, default=3e10)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--samples", type=float, default=None, help="samples that a run asks for (default: one epoch)")
    parser.add_argument("--folder", help="where files are made and removed (default: the system's temporary folder)")


def measure(given: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        sizes = int(given.documents), int(given.tokens), given.sequence_length
        found = order_times(Path(folder), *sizes, given.samples and int(given.samples))
    return Result(found, json.dumps(found, indent=1))


def order_times(folder: Path, documents: int, tokens: int, sequence_length: int, samples: int | None) -> dict:
    """Build, load and read: seconds, and the peak memory of this process in bytes (it includes mapped files).

    Wall and processor seconds differ on a machine that does other things too.
    """
    file = make_pair(folder / "corpus", sizes_of(documents, tokens))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    wanted = samples or (file.tokens - 1) // sequence_length
    examined, facts = timed(lambda: examine_once(file, folder / "cache"))

    def order() -> PythiaOrder:
        return PythiaOrder(
            file,
            0,
            documents,
            sequence_length,
            1234,
            samples=wanted,
            fingerprint=facts["fingerprint"],
            cache=folder / "cache",
        )

    built, first = timed(order)
    again, _ = timed(lambda: examine_once(file, folder / "cache"))
    loaded, second = timed(order)
    places = np.random.default_rng(1).integers(0, second.length, 2000).tolist()
    located, _ = timed(lambda: [second.spans(place) for place in places])
    blended, _ = timed(lambda: Blend([0.7, 0.2, 0.06, 0.04], wanted, folder / "cache"))
    seconds = {"examine": examined, "build": built, "blend of 4": blended, "examine again": again, "load": loaded}
    return {
        "documents": documents,
        "tokens": file.tokens,
        "samples": second.length,
        "epochs": first.epochs,
        "wall_seconds": {name: wall for name, (wall, _) in seconds.items()},
        "processor_seconds": {name: used for name, (_, used) in seconds.items()},
        "microseconds_per_sample": located[1] / len(places) * 1e6,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_bytes_before": before,
    }
