"""The results of extract.py on disk: a folder per checkpoint, with a part (parquet) per `PART` sequences.

A part appears whole or not at all, so a stopped job continues with the first missing one. `job.json` has the facts
that the parts depend on. Parts of other jobs are not mixed with these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    """Facts that results depend on.

    Attributes:
        checkpoint_step: updates of the model.
        steps: first, end and every.
        precision: compute type. Ties between likely tokens may differ in another type.
    """

    checkpoint: str
    checkpoint_step: int
    steps: tuple[int, int, int]
    samples: int
    context: int
    continuation: int
    scores: bool
    precision: str


def begin(folder: Path, job: RecitationJob) -> set[int]:
    """Write the job of a folder. Returns the numbers of the parts that it has.

    Raises:
        ResultError: it has the results of another job.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(json.dumps(asdict(job)))
    if (folder / JOB).exists():
        differences = [
            f"{key} was {old} and is {wanted.get(key)}"
            for key, old in read_job(folder).items()
            if old != wanted.get(key)
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
