"""Measure a curation of installed texts step by step, or the speed of its stages next to other programs.

    python -m bench curating --source rust=/usr/share/doc/rust python=/usr/lib/python3 --output data/installed
    python -m bench curating --stages --megabytes 20 --rounds 3

The first form curates all texts of the folders with one worker: thresholds, equal and similar texts, personal data. The
table has the processor time of each step, and the peak of the memory in it. The second form gives one worker the same
work in three programs, which take turns: ours, datatrove's own pipeline, and `datasets`. Each reads JSON lines, and
writes them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from bench.data.tokenize import write_corpus
from bench.runner import Result, compare, comparison, grid, in_folder, in_turns, share
from megatron.config.problems import UserError

ENDINGS = ".c .cc .cpp .go .h .hpp .html .java .js .md .pl .po .py .pyi .rb .rs .rst .sh .ts .txt .xml".split()
STAGES = [
    {"keep": {"signals": {"rps_doc_word_count": [50, 100_000], "rps_doc_mean_word_length": [2, 12]}}},
    {"exact": {"by": "normalised"}},
    {"minhash": {"n": 5, "bands": 14, "rows": 8}},
    {"pii": {}},
]
DATATROVE, DATASETS = "datatrove's own pipeline", "datasets.map and filter"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", nargs="+", metavar="NAME=FOLDER", default=[])
    parser.add_argument("--output", help="folder of the curated texts")
    parser.add_argument("--stages", action="store_true", help="compare stages with other programs")
    parser.add_argument("--megabytes", type=float, default=20, help="of the comparison")
    share(parser, "--rounds", rounds=3)


def curate(folder: Path, sources: list[dict[str, Any]], stages: list[Any], output: str) -> dict[str, Any]:
    from megatron.curation.recipe import read_recipe
    from megatron.curation.run import run

    values = {"output": output, "sources": sources, "stages": stages}
    (folder / "recipe.yml").write_text(json.dumps(values), encoding="utf-8")
    return run(read_recipe(folder / "recipe.yml"), quiet=True)


def measure(given: argparse.Namespace) -> Result:
    return compared(given) if given.stages else steps(given)


@in_folder
def steps(given: argparse.Namespace, folder: Path) -> Result:
    """A whole run, with processor seconds and peak memory of each step."""
    from megatron.curation import run as module

    if not given.source or not given.output:
        raise UserError("--source and --output must be given, or --stages")
    if wrong := [each for each in given.source if not all(each.partition("=")[::2])]:
        raise UserError(f"--source must be NAME=FOLDER, not {wrong[0]!r}")
    seconds: list[tuple[str, float, float]] = []

    class Measured(module.LocalExecutor):
        def run(self) -> None:
            Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory begins again
            begin = time.process_time()
            super().run()
            seconds.append((self.pipeline[0].name, time.process_time() - begin, _peak()))

    sources = [
        {"name": name, "path": path, "format": "text", "endings": ENDINGS, "skip": [".git"]}
        for name, path in (each.split("=", 1) for each in given.source)
    ]
    with mock.patch.object(module, "LocalExecutor", Measured):
        report = curate(folder, sources, STAGES, given.output)
    counts = list(_counts(Path(given.output)))
    rows: list[list[Any]] = [["step", "documents", "million characters", "processor s", "million/s", "peak MiB"]]
    shards = iter(counts)
    for name, used, peak in seconds:
        documents, characters = next(shards) if name == "shard" else (None, None)
        speed = f"{characters / used:.1f}" if characters else ""
        size = [f"{documents:,.0f}", f"{characters:,.0f}"] if characters else ["", ""]
        rows.append([name, *size, f"{used:.1f}", speed, f"{peak:,.0f}"])
    gone = {stage: sum(sum(each.values()) for each in found.values()) for stage, found in report["removed"].items()}
    totals = {name: sum(report[name].values()) for name in ("documents", "characters", "kept", "kept_characters")}
    about = {"files": report["files"], "bytes": report["bytes"], **totals, "removed": gone}
    about["quarantined"] = {reason: sum(each.values()) for reason, each in report["quarantined"].items()}
    return Result({"steps": rows, **about}, f"{grid(rows)}\n\n{json.dumps(about, indent=1)}")


def _peak() -> float:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def _counts(output: Path) -> Any:
    """Documents and million characters that entered each phase."""
    for phase in sorted((output / "states").glob("[0-9]*")):
        all_tasks = [json.loads(each.read_text()) for each in phase.glob("*.counts.json")]
        yield tuple(sum(sum(each[name].values()) for each in all_tasks) / by for name, by in _UNITS)


_UNITS = (("documents", 1), ("characters", 1e6))


def datatrove_filter(name: str) -> Any:
    """A filter of datatrove with the word splitter that ours gives it: its own needs spaCy."""
    from datatrove.pipeline import filters

    from megatron.curation.stages.datatrove_filters import RegexWords

    return getattr(filters, name)(language=RegexWords())


def filters() -> dict[str, tuple[list[Any], Callable[[], Any]]]:
    """Stages of ours by name, and the filter that the other programs get."""
    from megatron.curation.signals import TextViews

    def words() -> Any:
        from datatrove.pipeline.filters import LambdaFilter

        return LambdaFilter(lambda document: 50 <= len(TextViews(document.text).words) <= 100_000)

    return {
        "read and write": ([], lambda: None),
        "number of words": ([{"keep": {"signals": {"rps_doc_word_count": [50, 100_000]}}}], words),
        "Gopher's quality": ([{"gopher_quality": {}}], lambda: datatrove_filter("GopherQualityFilter")),
        "Gopher's repetition": ([{"gopher_repetition": {}}], lambda: datatrove_filter("GopherRepetitionFilter")),
    }


@in_folder
def compared(given: argparse.Namespace, folder: Path) -> Result:
    (folder / "raw").mkdir()
    size = write_corpus(folder / "raw" / "texts.jsonl", int(given.megabytes * 1e6))
    made: list[dict[str, Any]] = []
    for name, (stages, build) in filters().items():
        counts: dict[str, int] = {}

        def ours(stages: list[Any] = stages, counts: dict[str, int] = counts) -> float:
            source = {"name": "texts", "path": str(folder / "raw")}
            return _timed(
                folder, lambda out: sum(curate(folder, [source], stages, out)["kept"].values()), counts, "ours"
            )

        def trove(build: Any = build, counts: dict[str, int] = counts) -> float:
            return _timed(folder, lambda out: _datatrove(folder, out, build()), counts, DATATROVE)

        def arrow(build: Any = build, counts: dict[str, int] = counts) -> float:
            return _timed(folder, lambda out: _datasets(folder, out, build()), counts, DATASETS)

        seconds = in_turns({"ours": ours, DATATROVE: trove, DATASETS: arrow}, given.rounds)
        if len(set(counts.values())) > 1:
            raise RuntimeError(f"{name}: the programs keep different numbers of documents: {counts}")
        made += compare(f"{name}: {given.megabytes:g} MB of JSON lines, 1 worker", "MB/s", seconds, size / 1e6)
    return comparison(made)


def _timed(folder: Path, work: Callable[[str], int], counts: dict[str, int], name: str) -> float:
    output = folder / "out"
    shutil.rmtree(output, ignore_errors=True)
    begin = time.process_time()
    counts[name] = work(str(output))
    return time.process_time() - begin


def _datatrove(folder: Path, output: str, chosen: Any) -> int:
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from loguru import logger

    logger.disable("datatrove")
    writer = JsonlWriter(f"{output}/documents", "${rank}.jsonl.zst", compression="zstd")
    steps = [JsonlReader(str(folder / "raw")), *([chosen] if chosen else []), writer]
    stats = LocalPipelineExecutor(steps, 1, logging_dir=f"{output}/logs").run()
    return int(stats.stats[-1].stats["total"].total)


def _datasets(folder: Path, output: str, chosen: Any) -> int:
    import datasets
    from datatrove.data import Document

    def kept(text: str) -> bool:
        found = chosen.filter(Document(text, ""))
        return bool(found[0] if isinstance(found, tuple) else found)

    datasets.disable_progress_bars()
    files, cache = str(folder / "raw" / "texts.jsonl"), f"{output}/cache"
    data = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
    data = data.filter(kept, input_columns="text") if chosen else data
    data.to_json(f"{output}/texts.jsonl.gz", compression="gzip")
    return len(data)
