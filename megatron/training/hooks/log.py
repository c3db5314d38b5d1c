"""The training line: loss, rates and speed, every n steps."""

import resource
import sys
from typing import Any

import torch

from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of
from megatron.config.sequences import stage_at
from megatron.engine.protocol import Arriving
from megatron.report.ledger import hash_text
from megatron.report.peaks import Peak, device_peak

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: of tensors on the device, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _read(value: Any) -> Any:
    return float(value) if isinstance(value, (torch.Tensor, Arriving)) else value


class LogHook(Hook):
    """Writes a training record to the sinks at steps 0, n, 2n, ... and at the last. On an accelerator it does so when
    the numbers have arrived, while the next step runs.

    A record has step, loss (nats per token), lr, grad_norm (before clipping) and tokens (read so far, with this step).
    It has tokens_per_second, step_seconds, data_seconds (waiting for data, included in step_seconds), batch_hash,
    memory_bytes and eta_seconds. If known: tflops, mfu and peak_tflops. If fp16 overflowed: skipped. If no label
    counted: unlabelled, without loss and grad_norm. It also has the engine's extras and further numbers of other hooks.

    Speeds are means of the steps since the last record, without evaluation and checkpoints. TFLOP/s and MFU count the
    model's own operations (nothing recomputed) and are per device.

    Without `flops_per_token` of the parts it shows no TFLOP/s. The peak of MFU is that of `precision.compute`."""

    def __init__(self, parts: HookContext) -> None:
        self._flops, options = parts.flops_per_token, parts.config.logging
        self._every, self._given, self._compute = options.every, options.peak_tflops, parts.config.precision.compute
        self._steps, self._operations = 0, 0.0  # since the last record. Operations per token, summed over steps
        self._pace: float | None = None
        self._peak: Peak | None = None
        self._due: tuple[StepReport, dict[str, Any]] | None = None  # a record that waits for its numbers

    def on_start(self, trainer: Trainer) -> None:
        self._peak = peak = device_peak(device_name(trainer.exchange.device), self._compute, self._given)
        if peak.tflops is None and trainer.exchange.device.type != "cpu":  # a CPU has no known peak
            trainer.log(f"MFU is not shown: {peak.source}")
        trainer.clock.lap()

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        self._steps += 1
        self._operations += 0.0 if self._flops is None else self._flops(step)
        if step % self._every and not trainer.last:
            if trainer.is_main:
                trainer.sinks.progress(step + 1)
            return
        self._due = report, dict(trainer.extra_metrics)
        if trainer.last:
            trainer.settle()
        if not trainer.unread(report):
            self._record(trainer)

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        if self._due is not None and self._due[0] is report:
            self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        if self._due is None:
            return
        (report, extra_metrics), self._due = self._due, None
        step = report.step
        loss = report.loss  # waits for the device, so that the lap ends when the step does
        seconds, data_seconds = trainer.clock.lap()
        steps, self._steps = self._steps, 0
        operations, self._operations = self._operations / steps, 0.0
        if trainer.is_main:
            trainer.sinks.write({
                "step": step,
                "loss": loss,
                "lr": report.lr,
                "grad_norm": report.grad_norm,
                "tokens": trainer.tokens(step + 1),
                **self._speeds(trainer, step + 1 - steps, step + 1, seconds, operations),
                "step_seconds": seconds / steps,
                "data_seconds": data_seconds / steps,
                "batch_hash": hash_text(report.batch_hash),
                "memory_bytes": memory_bytes(trainer.exchange.device),
                "eta_seconds": self._eta(trainer, step + 1 - steps, step + 1, seconds),
                **({"skipped": True} if report.result.skipped else {}),
                **({"unlabelled": True} if report.result.unlabelled else {}),
                **{name: _read(value) for name, value in report.result.extras.items()},
                **extra_metrics,
            })

    def _speeds(self, trainer: Trainer, first: int, end: int, seconds: float, operations: float) -> dict[str, float]:
        rate = (trainer.tokens(end) - trainer.tokens(first)) / max(seconds, 1e-9)
        speeds = {"tokens_per_second": rate}
        if self._flops is not None:
            speeds["tflops"] = rate * operations / trainer.mesh.layout.world_size / 1e12
            if self._peak is not None and self._peak.tflops is not None:
                speeds["mfu"] = speeds["tflops"] / self._peak.tflops
                speeds["peak_tflops"] = self._peak.tflops
        return speeds

    def _eta(self, trainer: Trainer, begin: int, completed: int, seconds: float) -> float | None:
        """Seconds to the end of the run, from a running mean per token without the first lap, which compiles and warms
        up."""
        tokens = trainer.tokens
        if completed > trainer.start + 1:
            pace = seconds / (tokens(completed) - tokens(begin))
            self._pace = pace if self._pace is None else 0.9 * self._pace + 0.1 * pace
        return None if self._pace is None else self._pace * (tokens(trainer.end) - tokens(completed))


class LengthsHook(Hook):
    """Reports `training.sequence_schedule` and `training.batch_schedule`. The loader and the engine follow them by
    themselves."""

    def __init__(self, config: Config) -> None:
        self._config, self._batches = config, batches_of(config)
        self._told: tuple[int, int] | None = None  # numbers of the last reported stages

    @classmethod
    def of(cls, parts: HookContext) -> "LengthsHook | None":
        training = parts.config.training
        return cls(parts.config) if training.sequence_schedule or training.batch_schedule else None

    def before_step(self, trainer: Trainer, step: int) -> None:
        stage, batches, schedule = stage_at(self._config, step), self._batches, self._config.training.sequence_schedule
        samples, number = batches.size(step) * stage.pieces, batches.stage(step)
        trainer.extra_metrics |= {"sequence_length": stage.length} if schedule else {}
        trainer.extra_metrics |= {"global_batch_size": samples} if len(batches.sizes) > 1 else {}
        if (stage.number, number) == self._told:
            return
        self._told = stage.number, number
        rotary = schedule[stage.number].rotary if stage.end is not None else {}
        turned = {name: own.model_dump(mode="json") for name, own in rotary.items()}
        ends = [end for end in (stage.end, *batches.begins[number + 1 :][:1]) if end is not None]
        until = f"step {min(ends)}" if ends else "the end"
        named = "".join(f", {name} with rotary base {own.base:g} ({own.scaling.type})" for name, own in rotary.items())
        trainer.log(f"from step {step} to {until}: {samples} sequences of {stage.length} tokens per step{named}")
        trainer.record("stage", step=step, sequence_length=stage.length, samples_per_step=samples, rotary=turned)
