"""The facts of an optimizer that are needed before its class is imported. No torch here.

An optimizer declares them in one `OptimizerKind`, in a module that needs no torch. Its name in the registry stands for
that object. The object's name is in capitals (`my_lab.signum.options:OPTIMIZER`). A name may also stand for the class
itself (`my_lab.optim:Thing`). Nothing is then known of the optimizer before the ranks import it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .problems import Problem
from .registry import OPTIMIZER, description_of, descriptions_inside

if TYPE_CHECKING:
    from .rule_context import RuleContext
    from .schema import Config

Rule = Callable[["RuleContext"], Iterator[Problem]]
UNKNOWN_STATE = 8  # bytes per parameter that a plan assumes of an optimizer without an `OptimizerKind`: AdamW's
SHARED = ("betas", "epsilon", "momentum", "nesterov", "muon_lr", "muon_momentum", "muon_scale")  # not read by each


@dataclass(frozen=True)
class Option:
    """A number: its default (None: another key's value), the least and the largest one, and what it is.

    Attributes:
        below: the largest value itself is not allowed.
        whole: it must be a whole number.
        switch: it is true or false.
        choices: it is one of these words.
    """

    default: float | str | None
    least: float
    largest: float
    about: str
    below: bool = False
    whole: bool = False
    switch: bool = False
    choices: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The default as one writes it in YAML."""
        words = self.default is None or self.switch or isinstance(self.default, str)
        return str(self.default).lower() if words else f"{self.default:g}"

    def problem(self, value: Any) -> str | None:
        """The rule that a value breaks, or None."""
        if self.choices:
            return None if value in self.choices else f"must be one of {', '.join(self.choices)}"
        if self.switch:
            return None if isinstance(value, bool) else "must be true or false"
        kind = "a whole number" if self.whole else "a number"
        good = isinstance(value, int if self.whole else (int, float)) and not isinstance(value, bool)
        if good and self.least <= value and (value < self.largest if self.below else value <= self.largest):
            return None
        return f"must be {kind} from {self.least:g} to {'below ' if self.below else ''}{self.largest:g}"


CAUTIOUS = Option(False, 0, 1, "weights decay only where the step moves them towards 0 too", switch=True)


@dataclass(frozen=True)
class Package:
    """A package that an optimizer needs and the requirements do not have.

    Attributes:
        name: of the module.
        file: a file of it that must be there.
        command: how it is installed.
    """

    name: str
    file: str
    command: str


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    Attributes:
        update: import path of its class (`engine.optimizers.contract.Optimizer`).
        state_bytes: of its states per parameter, at least, on disk and in memory: a function of the configuration.
        reads: keys of the section `optimizer` among `SHARED` that it reads.
        options: keys of `optimizer.options` that it reads.
        rates_for: parametrizations (`model.parametrization.type`) whose rates are derived for it.
        why_no_rates: the reason for missing ones.
        whole_matrices: its class is a `MatrixOptimizer`.
        averages: it evaluates and saves an average of the weights.
        offloads: DeepSpeed has it for states in host memory.
        package: that it needs.
        rules: on its use in a configuration.
        input_rules: on files and packages of the host that starts the run.
    """

    update: str
    state_bytes: Callable[[Config], int]
    reads: tuple[str, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    rates_for: tuple[str, ...] = ()
    why_no_rates: str = "its steps depend on means over rows, blocks or eigenbases of a matrix"
    whole_matrices: bool = False
    averages: bool = False
    offloads: bool = False
    package: Package | None = None
    rules: tuple[Rule, ...] = ()
    input_rules: tuple[Rule, ...] = ()

    def options_of(self, config: Config) -> dict[str, Any]:
        """All options: those given in the configuration, and defaults."""
        given = config.optimizer.options
        return {key: given.get(key, option.default) for key, option in self.options.items()}


def optimizer_kind(config: Config) -> OptimizerKind | None:
    """The kind of the run's optimizer, or None if its name stands for a class, or for nothing that can be imported."""
    return description_of(OPTIMIZER, config.optimizer.type, tuple(config.model.extensions), OptimizerKind)


def kinds_inside() -> dict[str, OptimizerKind]:
    """The kinds of all optimizers of this package, by name."""
    return descriptions_inside(OPTIMIZER, OptimizerKind)


def state_bytes(config: Config) -> int:
    """Bytes of the optimizer's states per parameter."""
    kind = optimizer_kind(config)
    return UNKNOWN_STATE if kind is None else kind.state_bytes(config)


def unknown_options(context: RuleContext, section: str, known: Mapping[str, Option]) -> Iterator[Problem]:
    """Problems of `<section>.options`: names that `<section>.type` does not declare, and values that they forbid."""
    keys = (f"{section}.options", f"{section}.type")
    for name, value in context.value(keys[0]).items():
        if name not in known:
            its = f"the options of {context.value(keys[1])}"
            rule = f"{its} must be among {', '.join(known) or 'none'}, and {name} is not"
            yield context.problem(*keys, rule=rule, fix=f"remove it, or change {keys[1]}")
        elif problem := known[name].problem(value):
            fix = "remove it" + ("" if known[name].default is None else f", or use {known[name].shown}")
            yield context.problem(*keys, rule=f"{name} {problem}", fix=fix)


# Names that a user may try, why they are not built, and what to take.
_ELSEWHERE = "it is in the package more_optimizers (examples/optimizers)"
_ADD = "install that package, or put its folder into PYTHONPATH and write model.extensions: [more_optimizers]"
NOT_BUILT = {
    "jorge": (_ELSEWHERE, _ADD),
    "small_fc_lopt": (_ELSEWHERE, _ADD),
    "velo": (
        "VeLO is not built: its network reads each step's loss and the largest features over all tensors of the model. "
        "So no rank can compute a tensor's step from that tensor",
        "use small_fc_lopt of the package more_optimizers, whose network reads one tensor at a time",
    ),
    "mulo": ("MuLO is small_fc_lopt with the rates of muP", "use small_fc_lopt with model.parametrization.type=mup"),
}
