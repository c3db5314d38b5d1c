"""Options and rules of an optimizer come from the optimizer's own `OptimizerKind`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.optimizer_kind import UNKNOWN_STATE, kinds_inside, optimizer_kind, state_bytes
from megatron.config.problems import ConfigError
from megatron.config.registry import INSIDE, OPTIMIZER
from megatron.config.resolution import load, resolve
from megatron.config.schema import Config
from tests.paths import ROOT

SIGNUM = """
from megatron.config.optimizer_kind import OptimizerKind, Option

OPTIMIZER = OptimizerKind(
    update="{name}.update:Signum",
    state_bytes=lambda config: 4,
    reads=("momentum",),
    options={{"scale": Option(1.0, 0, 10, "of the sign")}},
    rates_for=("mup",),
    why_no_rates="nobody has derived them for depth",
)
"""


@pytest.fixture
def signum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An outside package with an optimizer of the recipe. Its class is never imported here."""
    name = "lab_of_signs"
    package = tmp_path / name
    package.mkdir()
    extension = {"optimizer": {"signum": f"{name}.options:OPTIMIZER", "plain": f"{name}.update:Signum"}}
    (package / "__init__.py").write_text(f"EXTENSION = {extension}\n")
    (package / "options.py").write_text(SIGNUM.format(name=name))
    (package / "update.py").write_text("class Signum:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[module]


def resolved(name: str, kind: str, **optimizer: object) -> Config:
    parametrization = optimizer.pop("parametrization", {})
    values = {
        "model": {"extensions": [name], "layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 64},
        "optimizer": {"type": kind, **optimizer},
        "training": {"steps": 2, "sequence_length": 16},
    }
    values["model"] |= {"attention": {"heads": 2}, "parametrization": parametrization}
    return resolve(values)


def test_momentum_has_an_effect_where_the_optimizer_reads_it(signum, tmp_path):
    file = tmp_path / "signum.yml"
    file.write_text(f"model: {{extensions: [{signum}]}}\noptimizer: {{type: signum, momentum: 0.95, nesterov: true}}\n")
    found = load([str(ROOT / "configs/test/tiny_llama.yml"), str(file)], check_inputs=False)
    about = "\n".join(str(each) for each in found.warnings)
    assert "nesterov must go with sgd, and has no effect here" in about
    assert "momentum must go with" not in about


def test_states_have_the_size_that_the_optimizer_says(signum):
    assert state_bytes(resolved(signum, "signum")) == 4
    assert state_bytes(resolved(signum, "plain")) == UNKNOWN_STATE
    assert optimizer_kind(resolved(signum, "plain")) is None


def test_parametrizations_are_those_that_the_optimizer_has_rates_for(signum):
    resolved(signum, "signum", parametrization={"type": "mup", "base_width": 16})
    with pytest.raises(ConfigError, match="nobody has derived them for depth"):
        resolved(signum, "signum", parametrization={"type": "completep", "base_width": 16, "base_depth": 2})


def test_options_are_checked_against_the_optimizers_own(signum):
    resolved(signum, "signum", options={"scale": 2.0})
    with pytest.raises(ConfigError, match="must be a number from 0 to 10"):
        resolved(signum, "signum", options={"scale": 11})
    with pytest.raises(ConfigError, match="must be among scale, and size is not"):
        resolved(signum, "signum", options={"size": 1})


def test_every_optimizer_of_the_package_has_a_kind_and_none_needs_torch():
    assert tuple(kinds_inside()) == tuple(INSIDE[OPTIMIZER])
    program = (
        "import sys; from megatron.config.optimizer_kind import kinds_inside; kinds_inside(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
