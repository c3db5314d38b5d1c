"""Keys and rules of adapters: LoRA (Hu et al. 2021), rsLoRA (Kalajdzievski 2023) and DoRA (Liu et al. 2024).

The linear layers that `adapter.targets` names get two small matrices, A and B. These are trained, and the weights of
`checkpoint.initialize_from` are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.features.feature import Feature, Keys, only_where
from megatron.config.pattern import PatternError
from megatron.config.section import Section, key

if TYPE_CHECKING:
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext

NAME = "adapters"  # of the feature, and of what its checkpoints say of the base
ALL = "all"


class AdapterSection(Section):
    type: Literal["none", "lora", "dora"] = key(
        "none",
        "lora: each target adds scale * B A x to its product. dora: each row of the sum of both matrices is scaled to "
        "a trained length, too. The other weights come from checkpoint.initialize_from and stay as they are.",
    )
    rank: int = key(16, "Rows of A, and columns of B.", gt=0)
    alpha: float = key(32.0, "The scale of the product B A is alpha / rank.", gt=0)
    rslora: bool = key(False, "The scale is alpha / sqrt(rank).")
    dropout: float = key(0.0, "Probability that an element of A's input is dropped in training.", ge=0, lt=1)
    targets: list[str] = key(
        lambda: [ALL],
        "Linear layers of blocks, by the end of their names, as in 'attention.query'. `*` stands for any text. all: "
        "every linear layer of every block. Experts, routers, the embedding, inputs of tokens and the head have no "
        "adapters.",
    )
    initialize_from: str | None = key(
        None, "Checkpoint of adapters that the run begins with, such as one of `deepy adapter from-peft`."
    )

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class AdapterKeys(Section):
    adapter: AdapterSection = key(AdapterSection, "Small matrices that are trained in place of the model's weights.")


TOP = Keys("", AdapterKeys, after="objective")


def adapter_of(config: Any) -> AdapterSection:
    """The section of a `Config`."""
    return TOP.of(config).adapter


def wanted(config: Any) -> bool:
    return adapter_of(config).type != "none"


def is_target(name: str, targets: Sequence[str]) -> bool:
    """Whether a linear layer of this logical name, such as layers.3.attention.query, is one that is named."""
    return ALL in targets or any(fnmatchcase(f".{name}", f"*.{each}") for each in targets)


def linear_names(config: Any) -> list[str] | None:
    """Logical names of the linear layers of all blocks. None: a kind does not name its own."""
    from megatron.config.kind import kinds_of  # these import the schema, which has the keys above
    from megatron.config.variants import options_of

    model, found = config.model, list[str]()
    kinds = kinds_of(tuple(model.extensions))
    for number, block in enumerate((*model.blocks, *model.further_blocks)):
        for each in block.kinds:
            own = kinds[each.name].linears(options_of(model, each))
            if own is None:
                return None
            if kinds[each.name].whole:
                return list(own)
            found += [f"layers.{number}.{each.name}.{name}" for name in own]
    return found


def there_are_targets(context: RuleContext) -> Iterator[Problem]:
    options = adapter_of(context.config)
    if not options.targets:
        yield context.problem("adapter.targets", rule="must name a linear layer", fix="remove it to adapt all of them")
        return
    try:
        names = linear_names(context.config)
    except (PatternError, KeyError):  # another rule says it
        return
    for each in options.targets if names is not None else ():
        if each != ALL and not any(is_target(name, [each]) for name in names or ()):
            known = sorted({re.sub(r".*\.\d+\.", "", name) for name in names or ()})
            yield context.problem(
                "adapter.targets",
                rule=f"{each!r} must be the end of a linear layer's name, and this model has none of that name",
                fix=f"use some of {', '.join(known)}",
            )


def there_is_a_base(context: RuleContext) -> Iterator[Problem]:
    checkpoint = context.config.checkpoint
    if checkpoint.initialize_from is None:
        yield context.problem(
            "checkpoint.initialize_from adapter.type",
            rule="must be given: adapters are trained on weights that somebody has trained",
            fix="name a checkpoint or the folder of a Hugging Face model",
        )
    for name in ("initialize_map", "initialize_layers"):
        if getattr(checkpoint, name):
            yield context.problem(
                f"checkpoint.{name} adapter.type",
                rule="must be empty: the weights under adapters stay what they are in the checkpoint",
                fix="make the other model first, in a run without adapters",
            )
    if checkpoint.initialize_vocabulary != "same":
        yield context.problem(
            "checkpoint.initialize_vocabulary adapter.type",
            rule="must be same: rows of new tokens are not trained under adapters",
            fix="train the rows first, in a run without adapters",
        )


def adapters_alone_are_trained(context: RuleContext) -> Iterator[Problem]:
    """Refuse keys that change other tensors than adapters, or that compute products outside of their layer."""
    config = context.config
    refused = {
        "parallel.async_tensor": (config.parallel.async_tensor, False, "gathers what several layers read"),
        "parallel.depth": (config.parallel.depth, 1, "gathers frozen matrices inside of a product"),
        "zero.offload_parameters.device": (config.zero.offload_parameters.device, "none", "moves frozen weights"),
    }
    for name, (value, wanted_value, why) in refused.items():
        if value != wanted_value:
            shown = str(wanted_value).lower()
            yield context.problem(
                name, "adapter.type", rule=f"must be {shown} with adapters, since it {why}", fix=f"use {name}={shown}"
            )
    for use in context.used:
        kind = context.kinds[use.kind]
        if kind.keeps_buffers(use.options) or kind.clips_logits(use.options):
            yield context.problem(
                f"adapter.type model.{use.kind}",
                rule=f"must be none: {use.kind} changes its weights or its router after each step, or has a table of "
                "experts",
                fix="turn off the correction of routers or the clipping of logits, or use router.select: top_k",
            )


def keys_have_a_use(context: RuleContext) -> Iterator[Problem]:
    if not wanted(context.config) and context.given("adapter.initialize_from"):
        yield context.problem(
            "adapter.initialize_from adapter.type",
            rule="must not be given without adapters",
            fix="use adapter.type=lora, or remove it",
        )


def _memory(config: Any, layout: Any, weights: Any) -> dict[str, float]:
    """Frozen weights have neither gradients nor states. Adapters have: about 2 r / H of the weights' number."""
    from megatron.plan.memory import states

    whole = states(config, layout, weights)
    share = 1 - min(1.0, 2 * adapter_of(config).rank / config.model.hidden_size)
    return {name: -share * whole[name] for name in ("gradients", "states")}


FEATURE = Feature(
    about="Trains small matrices next to frozen weights.",
    wanted=wanted,
    keys=(TOP,),
    rules=(*only_where(wanted, (there_are_targets, there_is_a_base, adapters_alone_are_trained)), keys_have_a_use),
    engine="megatron.features.adapters.part:Adapters",
    identity=tuple(f"adapter.{each}" for each in ("type", "rank", "alpha", "rslora", "targets")),
    draws=lambda config: wanted(config) and adapter_of(config).dropout > 0.0,
    memory=_memory,
    traffic=lambda config: "adapters (adapter.type)",
)
