"""What single optimizers need of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic.kernels import has_file, installed
from ..arithmetic.meta_weights import check_header, weights_file
from ..arithmetic.optimizer_options import PACKAGES, SCHEDULE_FREE
from ..problems import Problem
from ..registry import INSIDE, SCHEDULE
from ..rule_context import RuleContext


def schedule_free_has_no_schedule(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    kind = config.optimizer.type
    if kind not in SCHEDULE_FREE:
        return
    if config.schedule.type in INSIDE[SCHEDULE] and config.schedule.type != "constant":
        yield context.problem(
            "schedule.type",
            "optimizer.type",
            rule=f"{kind} must have a constant rate after the warmup: its average of the weights takes the place of a "
            "decay",
            fix="use schedule.type=constant, with a warmup",
        )
    if config.training.weight_average is not None:
        yield context.problem(
            "training.weight_average",
            "optimizer.type",
            rule=f"must be null with {kind}, which evaluates and saves an average of the weights already",
            fix="remove it",
        )
    betas = {"optimizer.betas": config.optimizer.betas}
    betas |= {f"optimizer.groups.{role}.betas": group.betas for role, group in config.optimizer.groups.items()
              if group.betas is not None}  # fmt: skip
    for key, (first, _) in betas.items():
        if first == 0:
            yield context.problem(
                key,
                "optimizer.type",
                rule=f"the first must be above 0 with {kind}: gradients would be taken at z alone, which does not tell "
                "the average",
                fix="use [0.9, 0.95]",
            )


def learned_steps_have_weights_and_a_rate(context: RuleContext) -> Iterator[Problem]:
    """Its network is trained elsewhere, and chooses the size of steps itself."""
    optimizer = context.config.optimizer
    if optimizer.type != "small_fc_lopt":
        return
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


def packages_are_here(context: RuleContext) -> Iterator[Problem]:
    kind = context.config.optimizer.type
    if kind not in PACKAGES or not context.starts_here:
        return
    package, file, command = PACKAGES[kind]
    if not has_file(package, file):
        other = f"; the package {package} that is installed has no {file}" if installed(package) else ""
        yield context.problem(
            "optimizer.type",
            rule=f"must be one whose package is installed: {kind} needs {package}{other}",
            fix=f"{command}, or use adamw",
        )


def learned_weights_can_be_read(context: RuleContext) -> Iterator[Problem]:
    optimizer = context.config.optimizer
    path = optimizer.options.get("weights")
    if optimizer.type != "small_fc_lopt" or not isinstance(path, str) or not context.starts_here:
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


RULES = (schedule_free_has_no_schedule, learned_steps_have_weights_and_a_rate)
INPUT_RULES = (packages_are_here, learned_weights_can_be_read)
