"""Stops a run whose numbers are not finite, with advice."""

import math
import threading

from megatron.checkpoint.save.policy import STOP_SIGNALS, StopSignals
from megatron.config.arithmetic.batches import batches_of
from megatron.data.skipped_batches import LeftOut
from megatron.engine.protocol import STOP
from megatron.report.ledger import hash_text

from ..exchange import StepReport
from ..hook import Hook, HookContext, StepError
from ..trainer import Trainer

SKIPS_IN_A_ROW = 50  # as GPT-NeoX: by then the loss scale has fallen to its floor and nothing will change


class NonFinite(StepError):
    """A loss, a gradient norm or the state is infinite or not a number, found in this update."""


class GuardHook(Hook):
    """Raises on every rank at the first step whose loss or gradient norm is not finite.

    Steps that the engine skipped (fp16 overflow) are part of dynamic loss scaling and pass, up to 50 in a row. A step
    without a label that counts is logged and passes: it has no loss, and changed nothing.

    Raises:
        NonFinite: with the step, its batch and samples, and the last good values.
    """

    def __init__(self, parts: HookContext) -> None:
        self._skipped = 0
        self._good = "none before it in this process"

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        if report.result.unlabelled:
            trainer.log(
                f"step {report.step}: no label of its batch counts ({_samples(trainer, report.step)}), so nothing was "
                "updated. The schedule and the data continue as usual"
            )
            return
        if report.result.skipped:
            self._skipped += 1
            if self._skipped == SKIPS_IN_A_ROW:
                raise NonFinite(
                    f"the gradients of {SKIPS_IN_A_ROW} steps in a row overflowed fp16, the last at step "
                    f"{report.step}. Use precision: bf16, or lower optimizer.lr or precision.loss_scale.initial_power",
                    report.step,
                )
            return
        self._skipped = 0
        if report.result.spike is not None and report.result.spike.action != STOP:
            return  # the hook for spikes reports it
        values = {"loss": report.loss, "gradient norm": report.grad_norm}
        bad = [f"{name} is {value}" for name, value in values.items() if value is not None and not math.isfinite(value)]
        if bad:
            raise NonFinite(self._text(trainer, report, " and the ".join(bad)), report.step)
        norm = "" if report.grad_norm is None else f", gradient norm {report.grad_norm:.4g}"
        self._good = f"loss {report.loss:.4f}{norm} at step {report.step}"

    def _text(self, trainer: Trainer, report: StepReport, what: str) -> str:
        return (
            f"the {what} at step {report.step} (learning rate {report.lr:.4g}, batch {hash_text(report.batch_hash)}, "
            f"{_samples(trainer, report.step)}). Last good step: {self._good}. "
            f"Nothing was saved after it, and earlier checkpoints are finite. Check the text of the batch with "
            f"`deepy data batch {trainer.config.run.dir} --step {report.step} --text`, and grad_norm "
            "before it in metrics.jsonl. A norm that climbed for some steps points at optimizer.lr, a sudden one at "
            "the data"
        )


def _samples(trainer: Trainer, step: int) -> str:
    batches = batches_of(trainer.config)
    left_out = (getattr(trainer.loader, "left_out", None) or LeftOut()).in_samples(batches)
    first, last = left_out.batch(batches.before(step)), left_out.batch(batches.before(step + 1) - 1)
    return f"samples {first} to {last}"


SIGNALS = tuple(number.name for number in STOP_SIGNALS)


class StopHook(Hook):
    """A signal on any rank, or rank 0's clock, ends the run after the step in which all ranks have received it.

    The checkpoint hook, which comes later in the list, then saves. A second signal has its default effect."""

    def __init__(self, parts: HookContext) -> None:
        self._minutes = parts.config.training.stop_after
        self._signals: StopSignals | None = None

    def on_start(self, trainer: Trainer) -> None:
        # Python delivers signals only to the main thread. A caller in another thread has its own way to stop.
        if threading.current_thread() is threading.main_thread():
            self._signals = StopSignals()
            self._signals.__enter__()

    def before_step(self, trainer: Trainer, step: int) -> None:
        if self._signals is not None and self._signals.received is not None:
            trainer.request(self._signals.received)
        if self._minutes is not None and trainer.is_main and trainer.clock.total >= 60 * self._minutes:
            trainer.request("wall time")

    during_step = before_step

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        self._stop(trainer, report.requests)

    def on_drop(self, trainer: Trainer, step: int, requests: set[str]) -> None:
        self._stop(trainer, requests)

    def _stop(self, trainer: Trainer, requests: set[str]) -> None:
        for name in SIGNALS:
            if name in requests:
                trainer.stop(f"signal {name}")
        if "wall time" in requests:
            trainer.stop(f"training.stop_after: {self._minutes:g} minutes")

    def on_end(self, trainer: Trainer) -> None:
        if self._signals is not None:
            self._signals.__exit__()
            self._signals = None
