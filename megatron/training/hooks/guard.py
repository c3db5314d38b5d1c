"""Stops a run whose numbers are no longer numbers, and says where to look."""

from __future__ import annotations

import math

from megatron.report.ledger import hash_text

SKIPS_IN_A_ROW = 50  # as GPT-NeoX: by then the loss scale has fallen to its floor and nothing will change


class NonFinite(RuntimeError):
    """A loss or gradient norm is infinite or not a number."""


class Guard:
    """Raises on every rank at the first step whose loss or gradient norm is not finite.

    Steps that the engine skipped (fp16 overflow) are part of dynamic loss scaling and pass, up to 50 in a row.

    Raises:
        NonFinite: naming the step, its batch and samples, and the last good values.
    """

    def __init__(self) -> None:
        self._skipped = 0
        self._good = "none before it in this process"

    def on_numbers(self, trainer, report) -> None:
        if report.result.skipped:
            self._skipped += 1
            if self._skipped == SKIPS_IN_A_ROW:
                raise NonFinite(
                    f"the gradients of {SKIPS_IN_A_ROW} steps in a row overflowed fp16, the last at step "
                    f"{report.step}; use precision: bf16, or lower optimizer.lr or precision.loss_scale.initial_power"
                )
            return
        self._skipped = 0
        values = {"loss": report.loss, "gradient norm": report.grad_norm}
        bad = [f"{name} is {value}" for name, value in values.items() if value is not None and not math.isfinite(value)]
        if bad:
            raise NonFinite(self._text(trainer, report, " and the ".join(bad)))
        norm = "" if report.grad_norm is None else f", gradient norm {report.grad_norm:.4g}"
        self._good = f"loss {report.loss:.4f}{norm} at step {report.step}"

    def _text(self, trainer, report, what: str) -> str:
        training = trainer.config.training
        first = report.step * training.global_batch_size
        return (
            f"the {what} at step {report.step} (learning rate {report.lr:.4g}, batch {hash_text(report.batch_hash)}, "
            f"samples {first} to {first + training.global_batch_size - 1}). Last good step: {self._good}. "
            f"No checkpoint was made of these weights. Look at the text of the batch with "
            f"`python tools/data/batch.py {trainer.config.run.dir} --step {report.step} --text`, and at grad_norm "
            "before it in metrics.jsonl: a norm that climbed for some steps points at optimizer.lr, a sudden one at "
            "the data"
        )
