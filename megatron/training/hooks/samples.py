"""Text that the model writes during training."""

from pathlib import Path

from megatron.config.problems import counted
from megatron.config.sections.output import SampleOptions
from megatron.report.jsonl import MetricsFile
from megatron.worker.beacon import EVALUATE

from ..exchange import StepReport
from ..hook import Generate, Hook, HookContext
from ..trainer import Trainer


class SamplesHook(Hook):
    """Continues the prompts of `evaluation.samples` every n steps. Rank 0 prints them and appends them to
    samples.jsonl.

    Args:
        generate: (prompts, options, step) -> one continuation per prompt. All ranks call it together, rank 0's count.
    """

    def __init__(self, options: SampleOptions, generate: Generate, folder: str | Path) -> None:
        self._options, self._generate, self._folder = options, generate, Path(folder)

    @classmethod
    def of(cls, parts: HookContext) -> "SamplesHook | None":
        if parts.generate is None:
            return None
        return cls(parts.config.evaluation.samples, parts.generate, parts.config.run.dir)

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        every = self._options.every
        if every is None or trainer.completed % every or not self._options.prompts:
            return
        trainer.settle()
        with trainer.aside(EVALUATE, "samples"):
            texts = self._generate(list(self._options.prompts), self._options, trainer.completed)
        if not trainer.is_main:
            return
        file = MetricsFile(self._folder / "samples.jsonl")
        for prompt, text in zip(self._options.prompts, texts, strict=True):
            file.write({"step": trainer.completed, "prompt": prompt, "text": text})
            trainer.log(f"sample after {counted(trainer.completed, 'step')}: {prompt}|{text}")
        file.close()
