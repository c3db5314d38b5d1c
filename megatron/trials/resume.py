"""Does a killed run resume as if undisturbed? To the last bit on the same layout, within rounding on others.

Three runs of the same configuration: an undisturbed one, one that is killed in the middle and started again, and one
that resumes from the same checkpoint on another layout."""

import json
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.read.logical import compare_tensors
from megatron.checkpoint.read.reader import open_checkpoint
from megatron.config import Config, ConfigError, load
from megatron.config.problems import counted

from .job import TrialError, TrialJob


@dataclass(frozen=True)
class Equality:
    """Result of a comparison."""

    tensors: int  # number of states of tensors that were compared
    different: tuple[str, ...]  # names of the states that are not equal to the last bit
    losses: int  # number of losses that were compared
    loss: float  # largest relative difference of a loss
    weight: float  # largest relative difference (of norms) of a tensor's master weights

    @property
    def bitwise(self) -> bool:
        return not self.different and self.loss == 0.0


def compare(a: Path, b: Path, losses_a: Mapping[int, float], losses_b: Mapping[int, float]) -> Equality:
    """Compare two checkpoints, and the losses of the steps that both runs have."""
    found = list(compare_tensors(open_checkpoint(a, verify="checksums"), open_checkpoint(b, verify="checksums")))
    steps = losses_a.keys() & losses_b.keys()
    gaps = [abs(losses_a[step] - losses_b[step]) / max(abs(losses_a[step]), 1e-12) for step in steps]
    masters = [each.relative for each in found if each.state == "master"]
    names = tuple(f"{each.tensor} ({each.state})" for each in found if not each.equal)
    return Equality(len(found), names, len(steps), max(gaps, default=0.0), max(masters, default=0.0))


# Another layout rounds differently in every operation of every step. The nudged run is changed only once.
MARGIN = 10.0
LEAST = 8 * 2.0**-23  # a few last digits of a loss, which is a sum in fp32


@dataclass(frozen=True)
class TrialLayout:
    ranks: int
    overrides: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join((counted(self.ranks, "rank"), *self.overrides))


@dataclass(frozen=True)
class Verdict:
    """Result of one resumption.

    Attributes:
        found: the comparison with the undisturbed run.
        bound: largest permitted relative difference of a loss. 0 asks for every bit. On another layout it is
            `MARGIN` times the difference made by half a last digit in the checkpoint's weights.
    """

    where: str
    resumed: int
    found: Equality
    bound: float

    @property
    def good(self) -> bool:
        if not self.found.losses or not self.found.tensors:
            return False
        return self.found.bitwise if self.bound == 0.0 else self.found.loss <= self.bound

    @property
    def text(self) -> str:
        found = self.found
        said = f"{'equal' if self.good else 'DIFFERENT'} on {self.where}, resumed at step {self.resumed}: "
        if found.bitwise:
            return said + f"{found.tensors} tensors and {found.losses} losses to the last bit"
        names = ", ".join(found.different[:3]) + (" and more" if len(found.different) > 3 else "")
        text = f"losses differ by at most {found.loss:.1e} (relative), weights by {found.weight:.1e}"
        return said + text + (f" (allowed: {self.bound:.1e})" if self.bound else f"; not equal: {names}")


def other_layout(words: Sequence[str], config: Config, ranks: int) -> TrialLayout | None:
    """Another layout on the same number of ranks or two, at most. None if the model permits none."""
    batch = (f"training.global_batch_size={config.training.global_batch_size}", "training.accumulation=null")
    stage = config.zero.stage
    candidates = [
        TrialLayout(max(ranks, 2), ("parallel.tensor=2", "parallel.pipeline=1", *batch)),
        TrialLayout(max(ranks, 2), ("parallel.pipeline=2", "parallel.tensor=1", "zero.stage=1", *batch)),
        TrialLayout(max(ranks, 2), (f"zero.stage={1 if stage != 1 else 2}", *batch)),
        TrialLayout(1, ("parallel.tensor=1", "parallel.pipeline=1", *batch)),
    ]
    own = (config.parallel.tensor, config.parallel.pipeline, stage, ranks)
    for each in candidates:
        try:
            found = load(list(words[:1]), [*words[1:], *each.overrides], ranks=each.ranks).config
        except ConfigError:
            continue
        if (found.parallel.tensor, found.parallel.pipeline, found.zero.stage, each.ranks) != own:
            return each
    return None


def verify_resume(
    words: Sequence[str],
    *,
    config: Config,
    ranks: int,
    steps: int,
    at: int,
    folder: Path,
    other: TrialLayout | None,
    report: Callable[[str], None],
) -> list[Verdict]:
    """Train, kill, resume and compare.

    Args:
        words: configuration file and overrides.
        at: step of the checkpoint after which ranks are killed.
        other: the other layout. None: only the same layout.
        report: called with a line about each stage.

    Raises:
        TrialError: a run failed by itself, so there is no result.
    """
    common = [f"training.steps={steps}", "launch.restarts=0", "checkpoint.keep_last=null", "checkpoint.resume=auto"]
    common.append("logging.every=1")  # every loss is compared
    whole = TrialJob(folder / "whole", [*words, *common], ranks)
    parts = TrialJob(folder / "parts", [*words, *common, f"checkpoint.every={at}"], ranks)
    jobs = [whole, parts]
    try:
        report(f"an undisturbed run of {steps} steps")
        complete(whole, "checkpoint.every=null")
        report(f"a run that is killed after step {at}")
        cut(parts, at, config)
        begun = [step for step in parts.checkpoints() if step <= at]
        if other is not None:
            moved = TrialJob(folder / "moved", [*words, *other.overrides, *common], other.ranks)
            jobs.append(moved)
            nudged = TrialJob(folder / "nudged", [*words, *common], ranks)
            jobs.append(nudged)
            for job, step in ((job, step) for job in (moved, nudged) for step in begun):
                shutil.copytree(parts.checkpoint(step), job.checkpoint(step))
        report("it resumes")
        complete(parts)
        found = [_verdict(whole, parts, f"the same layout ({counted(ranks, 'rank')})", steps, 0.0)]
        if other is not None:
            report(f"it resumes with {other.text}")
            complete(moved, "checkpoint.every=null")
            report("it resumes from weights moved by half a last digit, which measures rounding")
            nudge = {"type": "megatron.trials.inject:Nudge", "options": {"step": begun[-1]}}
            complete(nudged, "checkpoint.every=null", with_hook(config, nudge))
            spread = _verdict(whole, nudged, "", steps, 0.0).found.loss
            found.append(_verdict(whole, moved, other.text, steps, max(MARGIN * spread, LEAST)))
        return found
    finally:
        for job in jobs:
            job.close()


def complete(job: TrialJob, *overrides: str) -> None:
    """Run to the end.

    Raises:
        TrialError: it fails.
    """
    job.start(*overrides)
    status = job.finish()
    if status:
        raise TrialError(f"the run in {job.run} ended with status {status}. {job.tail()}")


def cut(job: TrialJob, at: int, config: Config) -> None:
    """Kill a rank in the step after checkpoint `at`. The run then ends.

    Raises:
        TrialError: it ended otherwise.
    """
    hook = {"type": "megatron.trials.inject:KillAt", "options": {"step": at, "folder": str(job.run / "checkpoints")}}
    job.start(with_hook(config, hook))
    status = job.finish()
    if status != 128 + signal.SIGKILL:
        raise TrialError(f"the run in {job.run} was to be killed, and ended with status {status}. {job.tail()}")


def with_hook(config: Config, hook: Mapping[str, object]) -> str:
    """The override that adds a hook to a run."""
    return f"hooks={json.dumps([*(each.model_dump() for each in config.hooks), hook])}"


def _verdict(whole: TrialJob, job: TrialJob, where: str, steps: int, bound: float) -> Verdict:
    resumed = [each["step"] for each in job.events("resume")]
    if not resumed:
        raise TrialError(f"the run in {job.run} has not resumed. {job.tail()}")
    found = compare(whole.checkpoint(steps), job.checkpoint(steps), whole.losses(), job.losses())
    return Verdict(where, resumed[-1], found, bound)
