"""Optimizers and their parameter groups.

`build_optimizer` makes one torch optimizer for the parameters of this rank; `set_learning_rate` gives each of its
groups the scheduled rate. AdamW, Lion and SGD work element by element, so ZeRO may flatten and cut their parameters
as it likes. Muon needs whole matrices; `muon_layouts` says where it has them.
"""

from .build import build_optimizer, set_learning_rate
from .groups import describe, parameter_groups
from .lion import Lion
from .muon import Muon, muon_layouts
from .sgd import SGD
from .state import initialize_state, state_names

__all__ = [
    "SGD",
    "Lion",
    "Muon",
    "build_optimizer",
    "describe",
    "initialize_state",
    "muon_layouts",
    "parameter_groups",
    "set_learning_rate",
    "state_names",
]
