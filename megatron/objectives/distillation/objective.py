"""Distillation: the student learns from a frozen teacher's distribution of each next token, and from the token itself.

Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015), arXiv 1503.02531."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ..contract import Objective, TeacherOptions

if TYPE_CHECKING:
    from megatron.config import Config


class Distillation(Objective):
    """(1 - alpha) * cross-entropy + alpha * temperature**2 * KL(teacher || student), both at the temperature."""

    def __init__(self, alpha: float, temperature: float) -> None:
        self.teacher = TeacherOptions(alpha, temperature)

    @classmethod
    def build(cls, config: Config) -> Self:
        return cls(config.objective.alpha, config.objective.temperature)
