"""Copies of a run's state on its own hosts or their neighbours, nearer than its folder of checkpoints."""

from .levels import Levels

__all__ = ["Levels"]
