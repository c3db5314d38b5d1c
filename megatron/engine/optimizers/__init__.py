"""Optimizers and their parameter groups.

`build_optimizer` makes one torch optimizer for the parameters of this rank; `set_learning_rate` gives each of its
groups the scheduled rate. AdamW, Lion and SGD work element by element, so ZeRO may flatten and cut their parameters
as it likes. Muon needs whole matrices: a `MatrixOptimizer` gets them on every layout.
"""

from .adamw import AdamW
from .build import build_optimizer, set_learning_rate
from .contract import Optimizer, element_states, fingerprints, initialize_state, number_names, state_names
from .groups import parameter_groups
from .lion import Lion
from .matrix import MatrixOptimizer
from .muon import Muon
from .sgd import SGD

__all__ = [
    "SGD",
    "AdamW",
    "Optimizer",
    "element_states",
    "Lion",
    "MatrixOptimizer",
    "Muon",
    "build_optimizer",
    "fingerprints",
    "initialize_state",
    "number_names",
    "parameter_groups",
    "set_learning_rate",
    "state_names",
]
