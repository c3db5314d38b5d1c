"""Results of extract.py on disk, and their summary: how well one checkpoint's set predicts another's.

There is a folder per checkpoint, with a part (parquet) per `PART` sequences. A part appears whole or not at all, so a
stopped job continues with the first missing one. `job.json` has the facts that the parts depend on. Parts of other jobs
are not mixed with these."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron.config.file_access import read_json, replace_file

JOB = "job.json"
PART = 4096  # sequences

SCHEMA = pa.schema([
    ("sample", pa.int64()),  # number in the run's order
    ("step", pa.int64()),
    ("sequence", pa.int32()),  # its place in the step's batch
    ("source", pa.string()),
    ("document", pa.int64()),  # of the first token. null if the run makes its data
    ("start", pa.int64()),  # the first token's place in that document
    ("documents", pa.int32()),  # number of documents in context and continuation
    ("extractable", pa.bool_()),
    ("score", pa.float32()),  # null if not asked for
    ("log_likelihood", pa.float64()),  # of the true continuation, in nats
])


class ResultError(Exception):
    """Results that cannot be used. The text has the rule and the fix."""


@dataclass(frozen=True)
class RecitationJob:
    """Facts that results depend on."""

    checkpoint: str
    checkpoint_step: int  # updates of the model
    steps: tuple[int, int, int]  # first, end and every
    samples: int
    context: int
    continuation: int
    scores: bool
    precision: str  # compute type. Ties between likely tokens may differ in another type.


def begin(folder: Path, job: RecitationJob) -> set[int]:
    """Write the job of a folder. Returns the numbers of the parts that it has.

    Raises:
        ResultError: it has the results of another job.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(json.dumps(asdict(job)))
    if (folder / JOB).exists():
        differences = [
            f"{k} was {old} and is {wanted.get(k)}" for k, old in read_job(folder).items() if old != wanted.get(k)
        ]
        if differences:
            raise ResultError(
                f"{folder} has results of other options ({'; '.join(differences)}), which must not be mixed: give "
                "another folder with --output"
            )
    replace_file(folder / JOB, json.dumps(wanted, indent=1), durable=True)
    return {int(path.stem.removeprefix("part_")) for path in folder.glob("part_*.parquet")}


def write_part(folder: Path, number: int, rows: Sequence[dict[str, Any]]) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), sink)
    replace_file(folder / f"part_{number:06d}.parquet", sink.getvalue().to_pybytes(), durable=True)


def read_job(folder: Path) -> dict[str, Any]:
    """The facts of a folder of results.

    Raises:
        ResultError: it is no such folder.
    """
    try:
        found = read_json(folder / JOB)
    except (OSError, ValueError) as error:
        raise ResultError(f"{folder} must be a folder that extract.py has written: {error}") from error
    if not isinstance(found, dict):
        raise ResultError(f"{folder / JOB} must have the facts of a job. It is damaged: make the results again")
    return found


def batches(folder: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The results of a folder, part by part, in the order of samples.

    Raises:
        ResultError: there are none, or a part is damaged.
    """
    paths = sorted(folder.glob("part_*.parquet"))
    if not paths:
        raise ResultError(f"{folder} has no results yet: run extract.py until its end")
    for path in paths:
        try:
            yield from pq.ParquetFile(path).iter_batches(columns=list(columns))
        except (pa.ArrowException, OSError) as error:
            raise ResultError(f"{path} is damaged ({error}): remove it and run extract.py again") from error


BINS = 10  # of scores


@dataclass(frozen=True)
class Summary:
    """Summary of one checkpoint.

    Attributes:
        sequences: number tried.
        extractable: number that the checkpoint recites without a mistake.
        mean_score: mean memorisation score. None without scores.
        histogram: numbers with a score in [0, 0.1), [0.1, 0.2), ..., [0.9, 1], without the extractable ones. None
            without scores.
        seen, unseen: (sequences, extractable) of the steps that the checkpoint had trained on, and of later ones.
    """

    checkpoint_step: int
    context: int
    continuation: int
    sequences: int
    extractable: int
    mean_score: float | None
    histogram: tuple[int, ...] | None
    seen: tuple[int, int]
    unseen: tuple[int, int]

    def text(self) -> str:
        lines = [
            f"checkpoint of step {self.checkpoint_step}, {self.context} tokens given, {self.continuation} asked for",
            f"{self.sequences:,} sequences, {_share(self.extractable, self.sequences)} extractable",
            f"  of steps before the checkpoint: {_share(self.seen[1], self.seen[0])}",
        ]
        if self.unseen[0]:
            lines.append(f"  of later steps: {_share(self.unseen[1], self.unseen[0])}")
        if self.mean_score is not None and self.histogram is not None:
            lines.append(f"mean score {self.mean_score:.4f}")
            lines += [
                f"  score {number / BINS:.1f} to {(number + 1) / BINS:.1f}: {count:,}"
                for number, count in enumerate(self.histogram)
                if count
            ]
        return "\n".join(lines)

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.4%})" if whole else "none"


def summary_of(folder: Path) -> Summary:
    """The summary of a folder of results.

    Raises:
        ResultError: it has none, or damaged ones.
    """
    job = read_job(folder)
    total = extractable = seen = seen_extractable = 0
    score_sum, histogram = 0.0, np.zeros(BINS, np.int64)
    for batch in batches(folder, ["step", "extractable", "score"]):
        flags = batch["extractable"].to_numpy(zero_copy_only=False)
        before = batch["step"].to_numpy() < job["checkpoint_step"]
        total, extractable = total + len(flags), extractable + int(flags.sum())
        seen, seen_extractable = seen + int(before.sum()), seen_extractable + int((flags & before).sum())
        if job["scores"]:
            scores = batch["score"].to_numpy(zero_copy_only=False).astype(np.float64)
            score_sum += float(scores.sum())
            bins = np.minimum((scores[~flags] * BINS + 1e-6).astype(np.int64), BINS - 1)
            histogram += np.bincount(bins, minlength=BINS)
    return Summary(
        job["checkpoint_step"],
        job["context"],
        job["continuation"],
        total,
        extractable,
        score_sum / total if job["scores"] and total else None,
        tuple(histogram.tolist()) if job["scores"] else None,
        (seen, seen_extractable),
        (total - seen, extractable - seen_extractable),
    )


@dataclass(frozen=True)
class ExtractionForecast:
    """Prediction of a late (or large) model's extractable set by an early (or small) model's."""

    sequences: int  # number that both were tried on
    hits: int  # hits, false_alarms, misses: extractable by both, only by the early one, only by the late one
    false_alarms: int
    misses: int

    @property
    def precision(self) -> float | None:
        """Share of the early model's recited sequences that the late one recites. None if there are none."""
        return self.hits / (self.hits + self.false_alarms) if self.hits + self.false_alarms else None

    @property
    def recall(self) -> float | None:
        """Share of the late model's recited sequences that the early one recites. None if there are none."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    @property
    def false_positive_rate(self) -> float | None:
        """Share of the sequences not recited by the late model that the early one recites."""
        others = self.sequences - self.hits - self.misses
        return self.false_alarms / others if others else None


def predict(early: Path, late: Path) -> ExtractionForecast:
    """Compare two folders of results over their common sequences.

    Raises:
        ResultError: one is damaged, they have different numbers of tokens, or no sequence in common.
    """
    jobs = [read_job(folder) for folder in (early, late)]
    for name in ("context", "continuation"):
        if jobs[0][name] != jobs[1][name]:
            raise ResultError(f"both must have the same --{name}: {early} has {jobs[0][name]}, {late} {jobs[1][name]}")
    (first, known), (second, wanted) = _flags(early), _flags(late)
    common, at, place = np.intersect1d(first, second, assume_unique=True, return_indices=True)
    if not len(common):
        raise ResultError(f"{early} and {late} must share sequences: give both runs of extract.py some --steps")
    own, true = known[at], wanted[place]
    return ExtractionForecast(len(common), int((own & true).sum()), int((own & ~true).sum()), int((true & ~own).sum()))


def _flags(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    parts = [
        (batch["sample"].to_numpy(), batch["extractable"].to_numpy(zero_copy_only=False))
        for batch in batches(folder, ["sample", "extractable"])
    ]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
