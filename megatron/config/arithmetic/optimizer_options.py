"""What `optimizer.options` may say for the optimizers inside the tree that read it. No torch here: rules check it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """A number or a path: its default (None: another key's value), the least and the largest one, and what it is.

    Attributes:
        below: the largest value itself is not allowed.
        whole: it must be a whole number.
        switch: it is true or false.
        path: it is the path of a file or folder.
    """

    default: float | None
    least: float
    largest: float
    about: str
    below: bool = False
    whole: bool = False
    switch: bool = False
    path: bool = False

    @property
    def shown(self) -> str:
        """The default as one writes it in YAML."""
        return str(self.default).lower() if self.default is None or self.switch else f"{self.default:g}"

    def problem(self, value: Any) -> str | None:
        """What a value must be, if it is not."""
        if self.path:
            return None if isinstance(value, str) and value.strip() else "must be the path of a file or folder"
        if self.switch:
            return None if isinstance(value, bool) else "must be true or false"
        kind = "a whole number" if self.whole else "a number"
        good = isinstance(value, int if self.whole else (int, float)) and not isinstance(value, bool)
        if good and self.least <= value and (value < self.largest if self.below else value <= self.largest):
            return None
        return f"must be {kind} from {self.least:g} to {'below ' if self.below else ''}{self.largest:g}"


# Of those inside the tree:
WHOLE_MATRICES = ("muon", "soap", "jorge", "adafactor", "adam_mini", "adamw_8bit", "small_fc_lopt")  # need them
# Need a package that is not among the requirements: its name, a file of it, how it is installed.
PACKAGES = {
    "adamw_8bit": ("torchao", "optim/subclass_8bit.py", "pip install torchao"),
    "small_fc_lopt": (
        "pylo",
        "optim/AdafacLO_naive.py",
        "pip install --no-deps git+https://github.com/Belilovsky-Lab/pylo mup==1.0.0 (PyPI's pylo is another program)",
    ),
}
# Names that a user may try, why they are not built, and what to take.
NOT_BUILT = {
    "velo": (
        "VeLO is not built: its network reads each step's loss and the largest features over all tensors of the model, "
        "so no rank can compute a tensor's step from that tensor",
        "use small_fc_lopt, whose network looks at one tensor at a time",
    ),
    "mulo": ("MuLO is small_fc_lopt with the rates of muP", "use small_fc_lopt with model.parametrization.type=mup"),
}
SCHEDULE_FREE = ("schedule_free_adamw",)  # evaluate and save an average of the weights in place of a decaying rate

OPTIONS: dict[str, dict[str, Option]] = {
    "muon": {"per_head": Option(False, 0, 1, "queries, keys and values are orthogonalised by heads", switch=True)},
    "soap": {
        "frequency": Option(10, 1, 10**9, "steps between two refreshes of the eigenbases", whole=True),
        "largest": Option(10_000, 0, 10**9, "a side that is longer is left in its own basis", whole=True),
        "beta": Option(None, 0, 1, "average of the factors; the second of optimizer.betas by default", below=True),
    },
    "jorge": {
        "frequency": Option(10, 1, 10**9, "steps between two updates of the preconditioners", whole=True),
        "start": Option(1e-6, 1e-30, 1e6, "the factors begin as this times the identity"),
        "lr": Option(None, 0, 1000, "peak rate of the matrices, of SGD's size; optimizer.lr by default"),
    },
    "adafactor": {
        "decay": Option(0.8, 0, 10, "the average of squares at step t has the coefficient 1 - t^-decay"),
        "clip": Option(1.0, 1e-6, 1e6, "largest root mean square of an update"),
    },
    "adamw_8bit": {"smallest": Option(4096, 1, 10**12, "matrices of fewer elements keep fp32 moments", whole=True)},
    "small_fc_lopt": {
        "weights": Option(None, 0, 0, "file or folder with the trained weights of the optimizer's network", path=True)
    },
    "ademamix": {
        "slow": Option(0.9999, 0, 1, "coefficient of the slow average", below=True),
        "alpha": Option(5.0, 0, 1000, "weight of the slow average"),
        "warmup": Option(None, 0, 10**12, "steps until both are reached; training.steps by default", whole=True),
    },
    "schedule_free_adamw": {
        "power": Option(0.0, 0, 100, "step t has a weight of t^power in the average"),
        "rate_power": Option(2.0, 0, 100, "times the largest scheduled rate so far to this power"),
    },
}


def options_of(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """All options of an optimizer: those given, and defaults."""
    return {key: given.get(key, option.default) for key, option in OPTIONS[name].items()}
