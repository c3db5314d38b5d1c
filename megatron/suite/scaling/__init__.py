"""Scaling laws of a suite's runs: how the loss falls with parameters and tokens, and what a budget is best spent on."""

from .isoflop import IsoFlop, IsoFlopProfile, fit_isoflop
from .law import Law, fit_law
from .points import Points, read_points, write_points
from .study import Study, study

__all__ = [
    "IsoFlop",
    "Law",
    "Points",
    "IsoFlopProfile",
    "Study",
    "fit_isoflop",
    "fit_law",
    "read_points",
    "study",
    "write_points",
]
