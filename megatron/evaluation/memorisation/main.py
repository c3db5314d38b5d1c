"""Have checkpoints recite sequences of the run's own data, and write down the scores, for extract.py.

Biderman et al., "Emergent and Predictable Memorization in Large Language Models" (2023), arXiv 2304.11158: the model
reads the first k tokens of a training sequence and continues greedily. The memorisation score is the share of the next
l tokens that are the sequence's own, place by place. A sequence of score 1 is extractable (Carlini et al. 2022).

A score is 1 if and only if each of the l tokens is the likeliest one after the true tokens before it. The continuation
equals the true text as long as it is right, so one pass decides that. Only sequences that are not extractable are
continued token by token."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from megatron.checkpoint.format.communicator import from_rank_0
from megatron.config import Config
from megatron.config.features.feature import for_reading
from megatron.data.errors import DataError
from megatron.data.provenance import Provenance
from megatron.data.sample import Sample
from megatron.data.skipped_batches import LeftOut
from megatron.decoding.schedule import Request
from megatron.engine.engine import build_engine
from megatron.evaluation.scoring import Row, Scorer, Text
from megatron.report.ledger import left_out
from megatron.training.start.resume import initialize, made_in
from megatron.training.start.same_run import data_changes
from megatron.training.world import World, joined
from megatron.worker.job import read_job
from megatron.worker.place import StartError

from ..arguments import OptionError
from ..checkpoints import named_checkpoints
from . import summary
from .arguments import Options, before_start, parse, smallest_batch
from .summary import summary_of


@dataclass(frozen=True)
class Recital:
    """A model's recitation of one sequence."""

    extractable: bool  # whether its greedy continuation is the sequence's own.
    # Share of the continuation's right tokens. None if not extractable, and scores were not asked for.
    score: float | None
    log_likelihood: float  # of the sequence's own continuation, in nats


def recite(scorer: Scorer, rows: Sequence[Row], context: int, *, scores: bool = True) -> list[Recital]:
    """The recitals of sequences. Repeated sequences are computed once. All ranks call it with the same ones.

    Args:
        rows: k + l tokens each.
        context: k.
        scores: also continue sequences that are not extractable, which costs up to l passes instead of one.
    """
    different = list(dict.fromkeys(rows))
    found = dict(zip(different, _recite(scorer, different, context, scores), strict=True))
    return [found[row] for row in rows]


def _recite(scorer: Scorer, rows: Sequence[Row], context: int, scores: bool) -> list[Recital]:
    length = len(rows[0]) - context if rows else 0
    read = scorer.score([Text(row, length) for row in rows])
    others = [number for number, each in enumerate(read) if scores and not each.greedy]
    made = scorer.answer([Request(rows[number][:context], length) for number in others])
    right: dict[int, float] = {
        number: sum(own == true for own, true in zip(each.tokens, rows[number][context:], strict=True)) / length
        for number, each in zip(others, made, strict=True)
    }
    return [Recital(x.greedy, 1.0 if x.greedy else right.get(i), x.log_likelihood) for i, x in enumerate(read)]


FOLDER = "memorisation"  # in the run's directory: a folder of results for each checkpoint


def extract() -> int:
    """Extract as the arguments and the environment of this process say. Returns the exit status."""
    config, place = read_job()
    try:
        options = parse(place.own)
    except OptionError as error:
        raise StartError(str(error)) from error
    if place.starter != "agent" and (wrong := before_start(place.own, config)):
        raise StartError("\n".join(wrong))  # with agents, deepy.py has checked before it started anything
    try:
        with joined(config, place) as world:
            run(config, options, world)
    except (CheckpointError, DataError, summary.ResultError) as error:
        raise StartError(str(error)) from error
    return 0


def run(config: Config, options: Options, world: World) -> None:
    """Have all requested checkpoints recite. All ranks call it.

    Raises:
        CheckpointError: one is missing or damaged, or is not of this model.
        DataError: the data differ from the checkpoint's. ResultError: the folder has results of other options.
    """
    log: Callable[[str], Any] = (
        (lambda line: print(line, file=sys.stderr, flush=True)) if world.is_main else (lambda _: None)
    )
    folder = options.output or Path(config.run.dir) / FOLDER
    found = left_out(Path(config.run.dir) / "ledger.jsonl")
    data = Provenance(config, left_out=None if found is None else LeftOut.of(found))
    engine = build_engine(for_reading(config), world.mesh, world.device, values=False)
    for path in named_checkpoints(config, world, options.checkpoint, options.every, folder):
        checkpoint = open_checkpoint(path, verify="sizes")
        _same_data(checkpoint, config, data)
        initialize(checkpoint, world, engine)
        engine.start_at(made_in(checkpoint, config))
        log(f"reciting with {path}")
        scorer = Scorer(
            config, engine, world.mesh, world.device, texts=options.texts or config.training.micro_batch_size
        )
        where = folder / f"step_{checkpoint.meta.step:08d}"
        job = job_of(config, options, checkpoint)
        Recitation(scorer, data, options, world, log).run(where, job)
        if world.is_main:
            print(f"{where}\n{summary_of(where).text()}\n", flush=True)


def job_of(config: Config, options: Options, checkpoint: Checkpoint) -> summary.RecitationJob:
    steps = options.steps
    return summary.RecitationJob(
        str(checkpoint.path),
        checkpoint.meta.step,
        (steps.start, steps.stop, steps.step),
        options.samples or smallest_batch(config, steps),
        options.context,
        options.continuation,
        options.scores,
        config.precision.compute,
    )


def _same_data(checkpoint: Checkpoint, config: Config, data: Provenance) -> None:
    """Check that step and sequence mean the same as in the checkpoint's run."""
    changed = data_changes(checkpoint.meta, config, data.plan, data.left_out)
    if changed:
        raise DataError(
            str(checkpoint.path),
            "the configuration must have the data of the checkpoint's run. " + "; ".join(changed),
            "give the run's own configuration (config.yml in its directory), and training.global_batch_size with it",
        )


class Recitation:
    """Recites the sequences of some steps with the scorer's model, part by part."""

    def __init__(
        self, scorer: Scorer, data: Provenance, options: Options, world: World, log: Callable[[str], Any]
    ) -> None:
        self.scorer, self.data, self.options, self.world, self.log = scorer, data, options, world, log

    def run(self, folder: Path, job: summary.RecitationJob) -> None:
        """Write the parts that a folder does not have yet. All ranks call it."""
        have = self._begin(folder, job)
        places = ((step, sequence) for step in self.options.steps for sequence in range(job.samples))
        total = len(self.options.steps) * job.samples
        for number in range(-(-total // summary.PART)):
            part = list(islice(places, summary.PART))
            if number in have:
                continue
            rows = self._part(part)
            if self.world.is_main:
                summary.write_part(folder, number, rows)
            self.world.communicator.barrier()
            self.log(f"{min((number + 1) * summary.PART, total):,} of {total:,} sequences")

    def _begin(self, folder: Path, job: summary.RecitationJob) -> set[int]:
        have, failure = from_rank_0(
            self.world.communicator, lambda: sorted(summary.begin(folder, job)), summary.ResultError, OSError
        )
        if failure:
            raise summary.ResultError(failure)
        return set(have)

    def _part(self, places: list[tuple[int, int]]) -> list[dict[str, Any]]:
        length = self.options.context + self.options.continuation
        numbers = [self.data.number(*place) for place in places]
        samples = [self.data.plan.sample(number) for number in numbers]
        recitals = recite(
            self.scorer,
            [tuple(sample.tokens[:length].tolist()) for sample in samples],
            self.options.context,
            scores=self.options.scores,
        )
        return [
            {
                "sample": number,
                "step": step,
                "sequence": sequence,
                **self._document(sample, length),
                "extractable": each.extractable,
                "score": each.score,
                "log_likelihood": each.log_likelihood,
            }
            for (step, sequence), number, sample, each in zip(places, numbers, samples, recitals, strict=True)
        ]

    def _document(self, sample: Sample, length: int) -> dict[str, Any]:
        if not sample.spans:
            return {"source": "synthetic", "document": None, "start": None, "documents": 1}
        ends = np.cumsum([span.length for span in sample.spans])
        return {
            "source": self.data.plan.sources[sample.source].name,
            "document": sample.spans[0].document,
            "start": sample.spans[0].start,
            "documents": int(np.searchsorted(ends, length)) + 1,
        }
