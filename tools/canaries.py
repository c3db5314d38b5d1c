#!/usr/bin/env python3
"""Measure memorisation of planted random passages, with and without the goldfish loss.

    deepy canaries FOLDER                          the experiment of docs/memorisation.md
    deepy canaries FOLDER --picture FILE           file of the picture (default: FOLDER/canaries.png)

Samples are 65 bytes each: sources of Python's standard library, and canaries, which are random bytes that occur 1, 10,
100 or 1000 times. A model of 0.3 million parameters reads each sample once. It then continues the first 32 tokens of
each sample by 32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

LENGTH, BATCH, EVERY = 64, 32, 50
GROUPS = {1: 8, 10: 8, 100: 8, 1000: 4}  # times that a canary occurs: how many such canaries there are
OBJECTIVES: dict[str, dict[str, Any]] = {
    "cross-entropy": {"type": "cross_entropy"},
    "goldfish, k = 4": {"type": "goldfish", "k": 4, "h": 13},
}


@dataclass(frozen=True)
class Corpus:
    """A token file whose documents are samples."""

    prefix: Path
    canary: np.ndarray  # of each document the number of the canary that it is, or -1 for text
    times: np.ndarray  # of each canary how often it occurs

    @property
    def steps(self) -> int:
        return len(self.canary) // BATCH


def library() -> np.ndarray:
    """uint8 [pieces, LENGTH + 1], the sources of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))), np.uint8)
    return found[: len(found) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)


def write_corpus(folder: Path, groups: dict[int, int], texts: int, seed: int = 0) -> Corpus:
    """Canaries and at least `texts` pieces of the standard library, which fill the last batch, in random order."""
    from megatron.data.token_file import TokenFileWriter

    draw = np.random.default_rng(seed)
    times = np.repeat(list(groups), list(groups.values()))
    canaries = draw.integers(0, 256, (len(times), LENGTH + 1))
    numbers = np.repeat(np.arange(len(times)), times)
    texts += -(texts + len(numbers)) % BATCH
    pieces = library()[:texts]
    canary = draw.permutation(np.concatenate([numbers, np.full(texts, -1)]))
    left = iter(pieces)
    prefix = folder / "rows"
    with TokenFileWriter(prefix, np.uint16) as writer:
        for number in canary.tolist():
            writer.append((next(left) if number < 0 else canaries[number]).tolist())
    return Corpus(prefix, canary, times)


def configuration(folder: Path, corpus: Corpus, objective: dict[str, Any], every: int) -> dict[str, Any]:
    """A small model that reads each sample once."""
    return {
        "run": {"dir": str(folder)},
        "model": {
            "layers": "(attention/mlp) x2",
            "hidden_size": 96,
            "vocab_size": 257,
            "norm": {"type": "rmsnorm"},
            "attention": {"heads": 4},
        },
        "training": {"steps": corpus.steps, "sequence_length": LENGTH, "global_batch_size": BATCH}
        | {"micro_batch_size": BATCH},
        "objective": objective,
        "optimizer": {"lr": 5e-3},
        "schedule": {"warmup_steps": corpus.steps // 25},
        "tokenizer": {"type": "bytes"},
        "data": {"train": [str(corpus.prefix)], "order": "stream"},
        "checkpoint": {"every": every, "optimizer_state": False},
        "evaluation": {"at_end": False},
        "logging": {"console": "quiet", "every": 10},
        "launch": {"ranks": 1},
    }


def train_and_extract(folder: Path, corpus: Corpus, objective: dict[str, Any], every: int = EVERY) -> dict[int, Path]:
    """Train, and let every checkpoint continue every sample. Return the folders of results by step."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "canaries.yml"
    file.write_text(json.dumps(configuration(folder / "run", corpus, objective, every)))  # JSON is YAML
    words = [sys.executable, str(ROOT / "deepy.py")]
    subprocess.run([*words, str(ROOT / "train.py"), str(file)], check=True)
    steps = ["--steps", f"0:{corpus.steps}", "--all-checkpoints", "--flags-only", "--batch-size", "64"]
    subprocess.run([*words, str(ROOT / "extract.py"), str(file), *steps], check=True, stdout=subprocess.DEVNULL)
    results = sorted((folder / "run" / "memorisation").iterdir())
    return {int(each.name.removeprefix("step_")): each for each in results}


def shares(corpus: Corpus, results: Path) -> dict[int, float]:
    """Share of canaries that a checkpoint recites, by number of occurrences."""
    from megatron.evaluation.memorisation.summary import batches

    recited = np.zeros(len(corpus.times), bool)
    for batch in batches(results, ["document", "extractable"]):
        numbers = corpus.canary[batch["document"].to_numpy()]
        flags = batch["extractable"].to_numpy(zero_copy_only=False)
        recited[numbers[flags & (numbers >= 0)]] = True
    return {int(times): float(recited[corpus.times == times].mean()) for times in np.unique(corpus.times)}


def draw(path: Path, found: dict[str, dict[int, float]]) -> None:
    """Draw each objective's share of recited canaries by number of occurrences."""
    from megatron.report.figures import new_figure, write_figure

    figure = new_figure(6.4, 3.6, 120)
    axes = figure.subplots()
    for marker, (name, each) in zip("os^", found.items()):
        axes.plot(list(each), [100 * share for share in each.values()], marker=marker, label=name)
    axes.set(xscale="log", xlabel="times that a canary occurs", ylabel="recited canaries in %", ylim=(-5, 105))
    axes.legend()
    axes.grid(alpha=0.3)
    write_figure(figure, path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the corpus and the runs")
    parser.add_argument("--texts", type=int, default=3100, help="pieces of text (default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="picture (default: canaries.png in the folder)")
    options = parser.parse_args(arguments)
    most = len(library()) - BATCH  # some more fill the last batch
    if not 1 <= options.texts <= most:
        parser.error(f"--texts must be from 1 to {most}, the pieces of Python's own library")
    from megatron.evaluation.memorisation.summary import predict

    options.folder.mkdir(parents=True, exist_ok=True)
    corpus = write_corpus(options.folder, GROUPS, options.texts)
    found = {}
    for name, objective in OBJECTIVES.items():
        results = train_and_extract(options.folder / objective["type"], corpus, objective)
        last = max(results)
        found[name] = shares(corpus, results[last])
        print(f"{name}: recited canaries by the times that they occur: {found[name]}")
        for step in sorted(results)[:-1]:
            each = predict(results[step], results[last])
            rates = [f"{rate:.3f}" if rate is not None else "-" for rate in (each.precision, each.recall)]
            print(f"  step {step} foretells step {last}: precision {rates[0]}, recall {rates[1]}")
    draw(options.picture or options.folder / "canaries.png", found)
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
