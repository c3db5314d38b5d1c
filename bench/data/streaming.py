"""Measure training from raw texts: the time to the first batch, and the speed next to a token file.

    python -m bench streaming --megabytes 1000 --workers 1 --tokenizer tokenizer.json

Batches are read while a process tokenises. The token file has the tokens that exist at the end. Both give the same
batches, which is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.data.tokenize import write_corpus
from bench.runner import Result
from megatron.config import resolve
from megatron.data.loader import Loader, build_loader
from megatron.data.token_file import write_index


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--tokenizer", required=True, metavar="FILE")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenise")
    parser.add_argument("--steps", type=int, default=100, help="batches to read")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--folder", help="where files are made and removed (default: the system's temporary folder)")


def loader_of(given: argparse.Namespace, source: dict[str, Any], cache: Path) -> Loader:
    """The loader of a run on one rank, without threads."""
    batch = {"global_batch_size": given.batch, "micro_batch_size": given.batch}
    values = {
        "model": {"layers": "attention/mlp", "hidden_size": 64, "attention": {"heads": 2}},
        "training": {"steps": given.steps, "sequence_length": given.sequence_length, **batch},
        "data": {"train": source, "order": "window", "workers": 0, "cache": str(cache)},
        "tokenizer": {"path": given.tokenizer},
    }
    values["data"]["streaming"] = {"workers": given.workers}
    return build_loader(resolve(values, ranks=1), data_rank=0, data_ranks=1)


def processor(file: Any) -> float:
    """Processor seconds of this process and of the one that tokenises, so far."""
    child = file._work._process
    fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split() if child is not None else []
    ticks = sum(map(int, fields[11:13])) if fields else 0
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def read(loader: Loader, steps: int) -> tuple[float, list[int]]:
    begin = time.perf_counter()
    hashes = [loader.read(step).hash for step in range(steps)]
    return time.perf_counter() - begin, hashes


def measure(given: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        folder = Path(place)
        (folder / "raw").mkdir()
        write_corpus(folder / "raw" / "texts.jsonl", given.megabytes * 10**6)
        begin, used = time.perf_counter(), time.process_time()
        loader = loader_of(given, {"stream": str(folder / "raw"), "path": str(folder / "it")}, folder / "cache")
        loader.read(0)
        file: Any = loader.plan.sources[0].file
        first, first_used = time.perf_counter() - begin, processor(file) - used
        waiting, hashes = read(loader, given.steps)
        again, _ = read(loader, given.steps)
        tokens, seconds, all_used = file._refresh(), time.perf_counter() - begin, processor(file) - used
        if (process := file._work._process) is not None:
            process.kill()
            process.wait()
        keep(folder / "it", folder / "whole", file)
        begin = time.perf_counter()
        other = loader_of(given, {"path": str(folder / "whole")}, folder / "cache2")
        other.read(0)
        opened = time.perf_counter() - begin
        plain, expected = read(other, given.steps)
    size = given.steps * given.batch * given.sequence_length
    found = {
        "text_bytes": given.megabytes * 10**6,
        "first_batch_seconds": {"stream": first, "token file": opened},
        "read_tokens_per_second": {"stream, first time": size / waiting, "stream": size / again, "file": size / plain},
        "first_batch_processor_seconds": first_used,
        "tokenized_tokens_per_second": tokens / seconds,
        "tokenized_tokens_per_processor_second": tokens / all_used,
        "equal": hashes == expected,
    }
    return Result(found, json.dumps(found, indent=1), status=0 if hashes == expected else 1)


def keep(prefix: Path, output: Path, file: Any) -> None:
    """A token file of the tokens that exist."""
    if file.whole is not None:
        for ending in (".bin", ".idx"):
            shutil.copy(f"{prefix}{ending}", f"{output}{ending}")
        return
    sizes = file._sizes(0, file._documents)
    Path(f"{output}.bin").write_bytes(file._bytes(".bin", 0, int(sizes.sum(dtype=np.int64)) * file.dtype.itemsize))
    with open(f"{output}.idx", "wb") as index:
        write_index(index, sizes, file.dtype)
