"""Options and rules of an objective come from the objective's own `ObjectiveKind`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megatron.config.features.objective_kind import ObjectiveKind, objective_kind, objectives_inside
from megatron.config.problems import ConfigError, UserError
from megatron.config.registry import INSIDE, OBJECTIVE
from megatron.config.resolution import resolve
from megatron.config.schema import Config
from megatron.config.sections.recipe import ObjectiveSection
from megatron.objectives.contract import Objective
from megatron.objectives.named import objective_of
from tests.paths import ROOT


class Plain(Objective):
    pass


class Twice(Objective):
    def cost(self, ce_N, lse_N):
        return ce_N

    def cost_of_logits(self, logits):
        return logits.ce_C


PROMISES_LOGITS = ObjectiveKind(objective=f"{__name__}:Plain", logits=True)


def resolved(**objective: Any) -> Config:
    return resolve({
        "model": {"layers": "attention/mlp", "hidden_size": 16, "vocab_size": 64, "attention": {"heads": 2}},
        "objective": objective,
        "training": {"steps": 2, "sequence_length": 16},
    })


def test_every_objective_of_the_package_has_a_kind_and_none_needs_torch():
    assert tuple(objectives_inside()) == tuple(INSIDE[OBJECTIVE])
    program = (
        "import sys; from megatron.config.features.objective_kind import objectives_inside; objectives_inside(); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_every_key_of_the_section_has_a_reader():
    read = {name for kind in objectives_inside().values() for name in kind.reads}
    assert read | {"type", "options"} == set(ObjectiveSection.model_fields)


def test_keys_and_options_of_others_are_refused():
    for given, rule in (
        ({"k": 3}, "objective.k must come with objective.type: goldfish"),
        ({"type": "goldfish", "alpha": 0.3}, "objective.alpha must come with objective.type: distillation"),
        ({"options": {"gamma": 1}}, "the options of cross_entropy must be among none, and gamma is not"),
    ):
        with pytest.raises(ConfigError, match=rule):
            resolved(**given)


def test_a_class_without_a_kind_may_read_any_key():
    config = resolved(type=f"{__name__}:Plain", k=3, options={"any": 1})
    assert objective_kind(config) is None and type(objective_of(config)) is Plain


def test_a_kind_says_what_its_class_does():
    with pytest.raises(UserError, match="its ObjectiveKind must have logits=False, as its class does"):
        objective_of(resolved(type=f"{__name__}:PROMISES_LOGITS"))
    with pytest.raises(UserError, match="must compute its costs in one way"):
        objective_of(resolved(type=f"{__name__}:Twice"))
