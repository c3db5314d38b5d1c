#!/usr/bin/env python
"""Measure the speed of tokenising, end to end.

Both encoders of tools/data/tokenize.py are compared with a loop like GPT-NeoX's preprocess_data.

    python tools/bench/tokenize.py --tokenizer tokenizer.json --workers 2 --megabytes 200

The text is the Python standard library's, repeated with a running number in each document up to the size asked for. All
ways write the same token file, which is checked. They take turns, `--rounds` times; the best time of each counts.
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from megatron.config.sections.data import TokenizerSection  # noqa: E402
from megatron.data.corpus.encode import Treatment  # noqa: E402
from megatron.data.corpus.inputs import find_inputs  # noqa: E402
from megatron.data.corpus.job import TokenizeJob, run  # noqa: E402
from megatron.data.corpus.registry import stdlib_texts  # noqa: E402
from megatron.data.token_file import token_dtype  # noqa: E402
from megatron.data.token_writer import TokenFileWriter  # noqa: E402
from megatron.data.tokenizer import build_tokenizer  # noqa: E402

_state: dict = {}


def write_corpus(path: Path, size: int) -> int:
    """Documents of the standard library, again and again, until so many bytes are written."""
    records, written, number = list(stdlib_texts()), 0, 0
    with open(path, "wb") as file:
        while written < size:
            record = records[number % len(records)]
            written += file.write(
                json.dumps({"text": f"{number} {record['text']}"}, ensure_ascii=False).encode() + b"\n"
            )
            number += 1
    return written


def _start(path: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _state["tokenizer"] = build_tokenizer(TokenizerSection(path=path))


def _line(line: str) -> tuple[list[int], int]:
    tokenizer = _state["tokenizer"]
    return [*tokenizer.encode(json.loads(line)["text"]), tokenizer.eod_id], len(line)


def plain_loop(corpus: Path, tokenizer: str, workers: int, output: Path) -> None:
    """Line by line through a pool, as preprocess_data does it: imap, chunks of 25 lines, one document at a time."""
    with (
        multiprocessing.get_context("spawn").Pool(workers, _start, (tokenizer,)) as pool,
        open(corpus, encoding="utf-8") as lines,
        TokenFileWriter(output, token_dtype(build_tokenizer(TokenizerSection(path=tokenizer)).size)) as writer,
    ):
        for tokens, _ in pool.imap(_line, lines, 25):
            writer.append(np.array(tokens))


def ours(corpus: Path, tokenizer: str, workers: int, output: Path, encoder: str) -> None:
    run(
        TokenizeJob(
            find_inputs([str(corpus)]),
            output,
            TokenizerSection(path=tokenizer),
            Treatment(),
            workers,
            encoder,
            overwrite=True,
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        result = measure(folder, given)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result, indent=1))
    return 0 if result["identical"] else 1


def measure(folder: Path, given: argparse.Namespace) -> dict:
    """Best seconds and MB/s of each way; whether all wrote the same."""
    corpus = folder / "corpus.jsonl"
    size = write_corpus(corpus, int(given.megabytes * 1e6))
    ways = {
        "plain loop": lambda output: plain_loop(corpus, given.tokenizer, given.workers, output),
        "tokenizer": lambda output: ours(corpus, given.tokenizer, given.workers, output, "tokenizer"),
        "gigatoken": lambda output: ours(corpus, given.tokenizer, given.workers, output, "gigatoken"),
    }
    best: dict[str, float] = {}
    used: dict[str, float] = {}
    for _ in range(given.rounds):
        for number, (name, way) in enumerate(ways.items()):
            begin, before = time.perf_counter(), _processor_seconds()
            way(folder / str(number))
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - begin)
            used[name] = min(used.get(name, float("inf")), _processor_seconds() - before)
    contents = {
        (folder / f"{number}.bin").read_bytes() + (folder / f"{number}.idx").read_bytes() for number in range(len(ways))
    }
    return {
        "bytes": size,
        "workers": given.workers,
        "seconds": best,
        "processor_seconds": used,
        "megabytes_per_second": {name: size / 1e6 / each for name, each in best.items()},
        "times_the_plain_loop": {name: best["plain loop"] / each for name, each in best.items()},
        "identical": len(contents) == 1,
    }


def _processor_seconds() -> float:
    """Of this process and its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
