"""Does a run that is killed go on as if it had not been? On the same layout to the last bit, on others within rounding.

Three runs of the same configuration: one that is left alone; one whose ranks are killed in the middle, and that is
started again; and one that goes on from the same checkpoint on another layout.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.read.compare import compare_tensors
from megatron.checkpoint.read.reader import open_checkpoint
from megatron.config import Config, ConfigError, load
from megatron.config.words import counted

from .job import TrialError, TrialJob


@dataclass(frozen=True)
class Equality:
    """What a comparison has found.

    Attributes:
        tensors: how many states of tensors were compared.
        different: names of those that are not equal to the last bit.
        losses: how many losses were compared.
        loss: the largest relative difference of a loss.
        weight: the largest relative difference (of norms) of a tensor's master weights.
    """

    tensors: int
    different: tuple[str, ...]
    losses: int
    loss: float
    weight: float

    @property
    def bitwise(self) -> bool:
        return not self.different and self.loss == 0.0


def compare(a: Path, b: Path, losses_a: Mapping[int, float], losses_b: Mapping[int, float]) -> Equality:
    """Two checkpoints, and the losses of the steps that both runs have."""
    found = list(compare_tensors(open_checkpoint(a, verify="checksums"), open_checkpoint(b, verify="checksums")))
    steps = losses_a.keys() & losses_b.keys()
    gaps = [abs(losses_a[step] - losses_b[step]) / max(abs(losses_a[step]), 1e-12) for step in steps]
    masters = [each.relative for each in found if each.state == "master"]
    names = tuple(f"{each.tensor} ({each.state})" for each in found if not each.equal)
    return Equality(len(found), names, len(steps), max(gaps, default=0.0), max(masters, default=0.0))


# A layout rounds otherwise in every operation of every step, the run that it is measured by in its weights once.
MARGIN = 10.0
LEAST = 8 * 2.0**-23  # losses are sums in fp32: a few of their last digits


@dataclass(frozen=True)
class TrialLayout:
    """Ranks, and the overrides that make the layout."""

    ranks: int
    overrides: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join((counted(self.ranks, "rank"), *self.overrides))


@dataclass(frozen=True)
class Verdict:
    """What one resumption has shown.

    Attributes:
        where: on which layout.
        resumed: the step it went on from.
        found: the comparison with the run that was left alone.
        bound: largest relative difference of a loss that is allowed; 0 asks for every bit. For another layout it is
            `MARGIN` times the difference that half a last digit in the weights of the checkpoint makes.
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
    """A layout that cuts the run in another way, on at most as many ranks or two; None if the model allows none."""
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
    tell: Callable[[str], None],
) -> list[Verdict]:
    """Train, kill, resume and compare.

    Args:
        words: configuration file and overrides.
        config: what they resolve to.
        steps: the length of the runs; at: the step of the checkpoint after which ranks are killed.
        other: the other layout; None leaves it out.
        tell: hears what is going on.

    Raises:
        TrialError: a run failed by itself, so nothing can be said.
    """
    common = [f"training.steps={steps}", "launch.restarts=0", "checkpoint.keep_last=null", "checkpoint.resume=auto"]
    common.append("logging.every=1")  # every loss is compared
    whole = TrialJob(folder / "whole", [*words, *common], ranks)
    parts = TrialJob(folder / "parts", [*words, *common, f"checkpoint.every={at}"], ranks)
    jobs = [whole, parts]
    try:
        tell(f"a run of {steps} steps that is left alone")
        complete(whole, "checkpoint.every=null")
        tell(f"one whose ranks are killed after step {at}")
        cut(parts, at, config)
        begun = [step for step in parts.checkpoints() if step <= at]
        if other is not None:
            moved = TrialJob(folder / "moved", [*words, *other.overrides, *common], other.ranks)
            jobs.append(moved)
            nudged = TrialJob(folder / "nudged", [*words, *common], ranks)
            jobs.append(nudged)
            for job, step in ((job, step) for job in (moved, nudged) for step in begun):
                shutil.copytree(parts.checkpoint(step), job.checkpoint(step))
        tell("it goes on")
        complete(parts)
        found = [_verdict(whole, parts, f"the same layout ({counted(ranks, 'rank')})", steps, 0.0)]
        if other is not None:
            tell(f"it goes on with {other.text}")
            complete(moved, "checkpoint.every=null")
            tell("it goes on with weights that differ by half a last digit, for the size of rounding")
            complete(nudged, "checkpoint.every=null", _nudge(config, begun[-1]))
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
    """Have a rank killed once a step after checkpoint `at` is done; the others cannot go on then.

    Raises:
        TrialError: it ended otherwise.
    """
    hook = {"type": "megatron.trials.inject:KillAt", "options": {"step": at, "folder": str(job.run / "checkpoints")}}
    job.start(with_hook(config, hook))
    status = job.finish()
    if status != 128 + signal.SIGKILL:
        raise TrialError(f"the run in {job.run} was to be killed, and ended with status {status}. {job.tail()}")


def _nudge(config: Config, step: int) -> str:
    return with_hook(config, {"type": "megatron.trials.inject:Nudge", "options": {"step": step}})


def with_hook(config: Config, hook: Mapping[str, object]) -> str:
    """The override that gives a run one more hook."""
    return f"hooks={json.dumps([*(each.model_dump() for each in config.hooks), hook])}"


def _verdict(whole: TrialJob, job: TrialJob, where: str, steps: int, bound: float) -> Verdict:
    resumed = [each["step"] for each in job.events("resume")]
    if not resumed:
        raise TrialError(f"the run in {job.run} has not resumed. {job.tail()}")
    found = compare(whole.checkpoint(steps), job.checkpoint(steps), whole.losses(), job.losses())
    return Verdict(where, resumed[-1], found, bound)
