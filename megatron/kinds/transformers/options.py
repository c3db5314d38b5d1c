"""Options of a model of transformers that is trained as it is, and their rules."""

from collections.abc import Callable, Iterator
from typing import Any

from megatron.config.kind import KindUse, LayerKind
from megatron.config.problems import Problem
from megatron.config.section import Needed, Section, key
from megatron.config.tree import leaves, thaw

from .facts import Facts, FactsError, facts_of


class TransformersOptions(Section):
    config: Needed[str] = key(
        None,
        "A folder of a Hugging Face model, a config.json, or a model type of transformers such as qwen3. The class for "
        "causal language models of this type is trained.",
    )
    options: dict[str, Any] = key(
        dict,
        "Settings of the model's configuration that differ, by transformers' names, as in '{num_hidden_layers: 4}'.",
    )
    settings: dict[str, Any] = key(
        dict,
        "The class's configuration, as resolved from config and options. Runs and checkpoints have it, so they need "
        "neither the folder nor the same defaults of transformers again. Give config and options instead.",
    )
    weights: bool = key(
        False, "Start from the weights of the folder. false: from the initial values of the class, under training.seed."
    )
    attention: str = key(
        "auto", "Attention of transformers, as in attn_implementation: eager, sdpa, ... auto is the class's own choice."
    )
    trust_remote_code: bool = key(
        False, "Run the Python code in the model's folder, with all that it may do to this machine."
    )


STAND_IN = 2**20  # rows of a vocabulary that any tokenizer fits
FREE = ("layers", "extensions", "vocab_multiple")  # other keys of `model` that keep their meaning


def _facts(options: TransformersOptions) -> Facts | None:
    """None where `it_can_be_built` reports the reason."""
    try:
        return facts_of(options.model_dump())
    except FactsError:
        return None


def stack(options: dict[str, Any]) -> dict[str, Any]:
    """Values of keys of `model` that the class sets. Stand-ins where it cannot be built, which a rule reports."""
    try:
        facts = facts_of(TransformersOptions().model_dump() | options)
    except FactsError:
        facts = Facts(hidden_size=1, vocab_size=STAND_IN)
    return {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "embedding.tied": facts.tied,
        "norm.type": "nonparametric",  # its norms are counted with the class
        **({"transformers.settings": facts.settings} if facts.settings else {}),
    }


def outline(options: TransformersOptions) -> tuple[int, str]:
    """Number of its blocks, and the name of the token embedding."""
    facts = _facts(options) or Facts()
    return max(1, len(facts.sizes)), facts.table


def it_can_be_built(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    try:
        facts_of(at.options.model_dump())
    except FactsError as error:
        yield at.problem(error.key, rule=error.rule, fix=error.fix)


def it_is_the_whole_model(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    if at.config.model.layers != at.kind or at.variant:
        rule = f"{at.kind} must be the only layer of the pattern, since it is a whole model"
        yield at.problem("model.layers", rule=rule, fix=f"write layers: {at.kind}")


def no_other_model(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    """Options of our own layers would be ignored."""
    from megatron.config.schema import lookup  # it imports the schema, which has the keys above

    facts, config = _facts(at.options), at.config
    if facts is None:
        return
    own: dict[tuple[Any, ...], Any] = {
        tuple(name.split(".")): value for name, value in stack(at.options.model_dump()).items()
    }
    for path, value in leaves(thaw(config.model.model_dump())):
        whole = ("model", *path)
        if path[0] in (*FREE, at.kind) or not at.context.origin(whole).given:
            continue
        if path in own:
            if value != own[path] and path[0] != "norm":
                rule = f"must be {own[path]}, the value of {facts.class_name}"
                setting = {"embedding": "tie_word_embeddings"}.get(str(path[0]), path[-1])
                fix = f"remove it, or set model.{at.kind}.options: {{{setting}: ...}}"
                yield at.context.problem_at(whole, rule=rule, fix=fix)
            continue
        known = lookup(whole)
        if known is None or value != known.default:
            rule = f"must not be given with layers: {at.kind}, since {facts.class_name} has its own layers"
            fix = f"remove it. Settings of the class go into model.{at.kind}.options"
            yield at.context.problem_at(whole, rule=rule, fix=fix)


ONE = "use 1: ZeRO (zero.stage 1 to 3) splits the states of any model over data parallel ranks"
# Keys that must have a value with this kind: (key, whether it is wrong, rule, fix).
LIMITS: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    *(
        (f"parallel.{name}", lambda size: size > 1, f"{name} must be 1: layers of other programs are not cut", ONE)
        for name in ("context", "depth", "expert", "folded", "stages_per_rank")
    ),
    (
        "training.activation_checkpointing.mode",
        lambda mode: mode == "selective",
        "mode must be none or full: the class recomputes whole layers",
        "use full, or none",
    ),
    (
        "training.activation_checkpointing.every",
        lambda every: every > 1,
        "every must be 1: the class recomputes all its layers",
        "remove it",
    ),
    (
        "training.sequence_chunks",
        lambda n: n > 1,
        "sequence_chunks must be 1: the class reads sequences whole",
        "use 1",
    ),
    (
        "objective.type",
        lambda kind: kind == "reward_model",
        "type must not be reward_model: the class has logits",
        "use dpo",
    ),
    ("training.compile", lambda mode: mode == "layer", "compile must be auto or off", "use off"),
    ("precision.products", lambda kind: kind != "compute", "products must be compute", "remove it"),
)


def limits(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    for name, wrong, rule, fix in LIMITS:
        value = at.context.option(name)
        if value is not None and wrong(value):
            yield at.problem(name, "model.layers", rule=rule, fix=fix)


def documents_are_apart(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    facts = _facts(at.options)
    if at.config.data.reset_attention_at_eod and facts is not None and facts.documents is False:
        rule = f"must be false: {facts.class_name} reads across the ends of documents"
        yield at.problem("data.reset_attention_at_eod model.layers", rule=rule, fix="remove it")


def slices_are_whole(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    facts, key, ranks = _facts(at.options), "parallel.tensor", at.config.parallel.tensor
    if facts is None or ranks == 1:
        return
    if facts.uncut:
        yield at.problem(key, "model.layers", rule=facts.uncut, fix=ONE)
        return
    wrong = {name: size for name, size in facts.divided.items() if size % ranks}
    if wrong:
        largest = next(n for n in range(ranks, 0, -1) if not any(size % n for size in facts.divided.values()))
        rule = "must divide " + ", ".join(f"{name}={size}" for name, size in list(wrong.items())[:3])
        yield at.problem(key, "model.layers", rule=f"{rule} of {facts.class_name}", fix=f"use {largest}")
    if at.config.parallel.sequence:
        rule = "must be false: the class reads sequences whole"
        yield at.problem("parallel.sequence", "model.layers", rule=rule, fix="remove it")


def stages_have_blocks(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    facts, key = _facts(at.options), "parallel.pipeline"
    if facts is None or at.config.parallel.pipeline == 1:
        return
    if not facts.sizes:
        rule = f"must be 1: {facts.class_name} has no list of its {facts.layers} blocks"
        yield at.problem(key, "model.layers", rule=rule, fix=ONE)
    if any(name == "output_router_logits" and value for name, value in _settings(facts)):
        rule = f"must be 1: {facts.class_name} computes the loss of routers from all its blocks"
        fix = f"use 1, or set model.{at.kind}.options: {{output_router_logits: false}}"
        yield at.problem(key, ".options", rule=rule, fix=fix)


def _settings(facts: Facts) -> Iterator[tuple[str, Any]]:
    """Settings of the class and of the models inside it."""
    rest = [facts.settings]
    while rest:
        for name, value in rest.pop().items():
            yield name, value
            if isinstance(value, dict):
                rest.append(value)


def router_losses_have_gradients(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    """A recomputed layer has no gradient yet when the class computes the loss of its routers."""
    facts, key = _facts(at.options), "training.activation_checkpointing.mode"
    if facts is None or at.context.option(key) != "full":
        return
    if any(name == "output_router_logits" and value for name, value in _settings(facts)):
        rule = f"must be none: the loss of routers of {facts.class_name} has no gradient with recomputation"
        fix = f"use none, or set model.{at.kind}.options: {{output_router_logits: false}}"
        yield at.problem(key, ".options", rule=rule, fix=fix)


def layers_run_on_all_ranks(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    """A rank that skips a layer does not gather its weights, and the other ranks wait."""
    facts = _facts(at.options)
    if facts is None or at.context.option("zero.stage") != 3:
        return
    for name, value in _settings(facts):
        if "layerdrop" in name and value:
            rule = f"must be at most 2: ranks skip different layers with {name}={value}"
            yield at.problem("zero.stage .options", rule=rule, fix=f"set options: {{{name}: 0.0}}, or zero.stage: 2")


def positions_are_in_the_table(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    facts, length = _facts(at.options), at.config.training.sequence_length
    if facts is not None and facts.positions is not None and length > facts.positions:
        rule = f"must be at most {facts.positions}, the positions that {facts.class_name} has learned vectors of"
        fix = "use shorter sequences, or set options: {max_position_embeddings: ...}"
        yield at.problem("training.sequence_length .options", rule=rule, fix=fix)


def linears(options: TransformersOptions) -> tuple[str, ...] | None:
    """Names of the linear layers of its blocks."""
    facts = _facts(options)
    return None if facts is None else tuple(facts.linears)


def adapters_need_linear_layers(at: KindUse[TransformersOptions]) -> Iterator[Problem]:
    facts = _facts(at.options)
    if at.context.option("adapter.type") not in (None, "none") and facts is not None and not facts.linears:
        rule = f"must be none: {facts.class_name} has no linear layers (torch's nn.Linear) in its blocks"
        yield at.problem(
            "adapter.type model.layers", rule=rule, fix="import the model (`deepy checkpoint from-hf`), or remove it"
        )


KIND = LayerKind(
    role="mixer",
    options=TransformersOptions,
    about="A model of transformers, trained as it is in place of our own layers (docs/any_model.md).",
    layer="megatron.kinds.transformers.build:Trunk",
    whole="megatron.kinds.transformers.model:WholeModel",
    stack=stack,
    rules=(
        it_can_be_built,
        it_is_the_whole_model,
        no_other_model,
        limits,
        documents_are_apart,
        router_losses_have_gradients,
        layers_run_on_all_ranks,
        positions_are_in_the_table,
        adapters_need_linear_layers,
        slices_are_whole,
        stages_have_blocks,
    ),
    outline=outline,
    linears=linears,
    keeps_fp32=False,
    draws=lambda options: True,
    mixes_samples=lambda options: False,
)
