"""Facts of the learned optimizer small_fc_lopt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.config.optimizer_kind import OptimizerKind, Option, Package
from megatron.config.problems import Problem

from .network import check_header, weights_file

if TYPE_CHECKING:
    from megatron.config.rule_context import RuleContext


class PathOption(Option):
    """An option that is a path. Its limits have no meaning."""

    def problem(self, value: Any) -> str | None:
        return None if isinstance(value, str) and value.strip() else "must be the path of a file or folder"


def learned_steps_have_weights_and_a_rate(context: RuleContext) -> Iterator[Problem]:
    """Its network is trained elsewhere, and chooses the size of steps itself."""
    optimizer = context.config.optimizer
    if "weights" not in optimizer.options:
        yield context.problem(
            "optimizer.options",
            "optimizer.type",
            rule="small_fc_lopt must have the trained weights of its network, from a file of this machine: nothing is "
            "downloaded",
            fix="huggingface-cli download btherien/mulo --local-dir mulo, and options: {weights: mulo}",
        )
    if not context.given("optimizer.lr"):
        yield context.problem(
            "optimizer.lr",
            "optimizer.type",
            rule="must be given with small_fc_lopt: it multiplies steps whose size the network has chosen",
            fix="use optimizer.lr=1.0, with which the network was trained",
        )


def learned_weights_can_be_read(context: RuleContext) -> Iterator[Problem]:
    optimizer = context.config.optimizer
    path = optimizer.options.get("weights")
    if not isinstance(path, str) or not context.starts_here:
        return
    try:
        check_header(weights_file(path))
    except (ValueError, OSError) as error:
        yield context.problem(
            "optimizer.options",
            "optimizer.type",
            rule=f"weights {error}" if isinstance(error, ValueError) else f"weights must be readable: {error}",
            fix="give weights of small_fc_lopt: a .safetensors or .pt file, or a folder with model.safetensors",
        )


PACKAGE = Package(
    "pylo",
    "optim/AdafacLO_naive.py",
    "pip install --no-deps git+https://github.com/Belilovsky-Lab/pylo mup==1.0.0 (PyPI's pylo is another program)",
)
OPTIMIZER = OptimizerKind(
    update="more_optimizers.small_fc_lopt.update:SmallFcLopt",
    state_bytes=lambda config: 16,
    reads=(),
    options={"weights": PathOption(None, 0, 0, "file or folder with the trained weights of the optimizer's network")},
    rates_for=("mup",),  # Adam's rates (MuLO, Thérien et al. 2024, arXiv 2406.00153)
    why_no_rates="its rates are known only over widths",
    whole_matrices=True,
    package=PACKAGE,
    rules=(learned_steps_have_weights_and_a_rate,),
    input_rules=(learned_weights_can_be_read,),
)
