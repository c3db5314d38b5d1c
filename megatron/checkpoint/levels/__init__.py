"""Copies of a run's state that are nearer than its folder of checkpoints: on its own hosts, or a neighbour's."""

from .levels import Levels

__all__ = ["Levels"]
