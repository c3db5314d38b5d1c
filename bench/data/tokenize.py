"""Measure the speed of tokenising, end to end.

Both encoders of tools/data/tokenize.py are compared with a loop like GPT-NeoX's preprocess_data.

    python -m bench tokenize --workers 2 --megabytes 200 [--tokenizer tokenizer.json]

The text is the Python standard library's, repeated with a running number in each document up to the size asked for. All
ways write the same token file, which is checked. They take turns, `--rounds` times.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np

from bench.runner import Result, compare, comparison, in_folder, in_turns, share
from megatron.config.sections.data import TokenizerSection
from megatron.data.corpus.encode import Treatment
from megatron.data.corpus.inputs import find_inputs
from megatron.data.corpus.job import TokenizeJob, run
from megatron.data.corpus.registry import stdlib_texts
from megatron.data.token_file import TokenFileWriter, token_dtype
from megatron.data.tokenizer import build_tokenizer

PEER = "a pool that encodes line by line"  # as GPT-NeoX's preprocess_data.py does
_state: dict = {}


def write_corpus(path: Path, size: int) -> int:
    """Documents of the standard library, again and again, until that number of bytes is written."""
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


def train_tokenizer(path: Path, size: int) -> str:
    """A byte-level BPE vocabulary of the standard library's texts, for a machine that has no other."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator((record["text"] for record in stdlib_texts()), trainer)
    made.save(str(path))
    return str(path)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", help="a tokenizer.json. Without it a BPE of 4,096 tokens is trained first")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=200)
    share(parser, "--rounds", "--clock", rounds=3)


@in_folder
def measure(given: argparse.Namespace, folder: Path) -> Result:
    """Each of our encoders, compared with the plain loop.

    Raises:
        RuntimeError: not all wrote the same files.
    """
    corpus = folder / "corpus.jsonl"
    tokenizer = given.tokenizer or train_tokenizer(folder / "tokenizer.json", 4096)
    size = write_corpus(corpus, int(given.megabytes * 1e6))
    encoders, now = ("tokenizer", "gigatoken"), _processor_seconds if given.clock == "cpu" else time.perf_counter

    def timed(name: str) -> float:
        begin = now()
        if name in encoders:
            ours(corpus, tokenizer, given.workers, folder / f"of-{name}", name)
        else:
            plain_loop(corpus, tokenizer, given.workers, folder / f"of-{name}")
        return now() - begin

    names = (PEER, *encoders)
    seconds = in_turns({name: functools.partial(timed, name) for name in names}, given.rounds)
    written = {(folder / f"of-{name}.bin").read_bytes() + (folder / f"of-{name}.idx").read_bytes() for name in names}
    if len(written) > 1:
        raise RuntimeError("the ways wrote different files")
    what = f"tokenise {given.megabytes:g} MB, {given.workers} workers"
    made = []
    for name in encoders:
        both = {PEER: seconds[PEER], name: seconds[name]}
        made += compare(f"{what}, {name}", "MB/s", both, size / 1e6, ours=name)
    return comparison(made)


def _processor_seconds() -> float:
    """Of this process and its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
