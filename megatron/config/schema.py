"""The whole configuration of a run: one frozen object, made of the sections."""

from __future__ import annotations

from typing import Any

from .sections.base import Section, key
from .sections.data import DataSection, TokenizerSection
from .sections.layout import LaunchSection, ParallelSection, PrecisionSection, ZeroSection
from .sections.model import ModelSection
from .sections.output import CheckpointSection, EvaluationSection, LoggingSection, RunSection
from .sections.recipe import OptimizerSection, ScheduleSection, TrainingSection


class Config(Section):
    """A run, completely. After resolution every derived key has its value and nothing changes it."""

    run: RunSection = key(RunSection, "What the run is called and where it lives.")
    model: ModelSection = key(..., "What the model computes.")
    parallel: ParallelSection = key(ParallelSection, "How the run is cut over ranks.")
    zero: ZeroSection = key(ZeroSection, "What data parallel ranks share.")
    precision: PrecisionSection = key(PrecisionSection, "Number formats.")
    optimizer: OptimizerSection = key(OptimizerSection, "How parameters are updated.")
    schedule: ScheduleSection = key(ScheduleSection, "How the learning rate changes.")
    training: TrainingSection = key(..., "Steps, batches and the objective.")
    data: DataSection = key(DataSection, "What the run reads.")
    tokenizer: TokenizerSection = key(TokenizerSection, "How text becomes tokens.")
    checkpoint: CheckpointSection = key(CheckpointSection, "What the run keeps.")
    evaluation: EvaluationSection = key(EvaluationSection, "How the run is judged while it trains.")
    logging: LoggingSection = key(LoggingSection, "What the run tells.")
    launch: LaunchSection = key(LaunchSection, "Where the run's processes start.")
    deepspeed: dict[str, Any] = key(dict, "Raw DeepSpeed options, merged last into what the engine writes.")
