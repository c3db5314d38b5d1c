"""Scaling laws of a suite's runs: how the loss falls with parameters and tokens, and what a budget is best spent on."""

from .law import IsoFlop as IsoFlop
from .law import IsoFlopProfile as IsoFlopProfile
from .law import Law as Law
from .law import fit_isoflop as fit_isoflop
from .law import fit_law as fit_law
from .points import Points as Points
from .points import read_points as read_points
from .points import write_points as write_points
from .study import Study as Study
from .study import study as study
