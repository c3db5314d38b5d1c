"""Rules of a mixture of experts: number of experts, groups of equal size, widths that can be cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.arithmetic.wire import LEAST_BLOCK, PIPELINE, sends_blocks
from megatron.config.kind import KindUse
from megatron.config.problems import divisors, multiples, near
from megatron.kinds.common.options import divides_over_tensor_ranks
from megatron.parallel.messages.traffic import SIZES

from .layout_rules import LAYOUT_RULES

if TYPE_CHECKING:
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext

    from .options import MoEOptions


def top_k_of_the_experts(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    moe = at.options
    if moe.top_k > moe.experts:
        yield at.problem(".top_k .experts", rule="must not exceed moe.experts", fix=f"use at most {moe.experts}")


def gates_are_there_to_be_cut(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    for name in ("limit", "up_offset", "shared_limit"):
        if getattr(at.options, name) and not at.options.gated:
            yield at.problem(
                f".{name} .gated",
                rule=f"{name} must go with gated experts, whose gate and up it changes",
                fix=f"use gated: true, or remove {name}",
            )


def groups_are_equal(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    moe, router, groups = at.options, at.options.router, ".router.groups"
    if moe.experts % router.groups:
        yield at.problem(
            groups,
            ".experts",
            rule="groups must have equal numbers of experts",
            fix=f"use {near(router.groups, divisors(moe.experts))} groups",
        )
    elif router.top_groups > router.groups:
        yield at.problem(
            ".router.top_groups", groups, rule="must not exceed router.groups", fix=f"use at most {router.groups}"
        )
    elif moe.top_k <= moe.experts and moe.top_k > router.top_groups * (moe.experts // router.groups):
        open_to_it = router.top_groups * (moe.experts // router.groups)
        yield at.problem(
            ".top_k .router.top_groups",
            groups,
            rule=f"top_k must not exceed the {open_to_it} experts of the groups that a token may choose from",
            fix="use a smaller top_k, more top_groups, or fewer groups",
        )


def widths_are_cut_and_aligned(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    moe, compute, ranks = at.options, at.config.precision.compute, at.config.parallel.expert_tensor
    unit, columns = 16 // SIZES[compute], at.config.parallel.columns
    if moe.latent_size and moe.latent_size % (unit * columns):
        parts = f" on each of {columns} columns" * (columns > 1)
        yield at.problem(
            ".latent_size",
            "precision.compute",
            *("parallel.columns",) * (columns > 1),
            rule="latent_size must be a multiple of 16 bytes for grouped products, "
            f"{unit} channels in {compute}{parts}",
            fix=f"use {multiples(moe.latent_size, unit * columns)} channels",
        )
    cut = "parallel.expert_tensor" if at.given("parallel.expert_tensor") else "parallel.tensor"
    if moe.hidden_size % (ranks * unit):
        yield at.problem(
            ".hidden_size",
            cut,
            "precision.compute",
            rule="each tensor parallel rank must have the same share of an expert's channels, "
            f"a multiple of 16 bytes ({unit} channels in {compute})",
            fix=f"use {multiples(moe.hidden_size, ranks * unit)} channels",
        )


def balancers_fit_the_choice(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    moe, router, select = at.options, at.options.router, ".router.select"
    if router.select == "expert_choice":
        yield at.warning(
            select,
            rule="a causal model must not let experts choose tokens: they see the whole micro-batch, later tokens too, "
            "and generated text differs from what was trained on",
            fix="use select: top_k, except for studies of the method",
        )
    other, experts_choose = router.select != "top_k", router.select == "expert_choice"
    for key, wrong, rule, fix in (
        (
            ".router.correction",
            other and router.correction != "none",
            f"correction must be none: {router.select} evens the load by itself",
            "use correction: none, or select: top_k",
        ),
        (
            ".router.top_groups",
            other and router.top_groups < router.groups,
            f"all groups must be open to a token: {router.select} knows no groups",
            "remove groups and top_groups, or use select: top_k",
        ),
        (
            ".router.normalize",
            experts_choose and router.normalize,
            "weights must not be normalised: a token that experts have chosen cannot know of all of them",
            "use normalize: false",
        ),
        (
            ".capacity_factor",
            experts_choose and moe.capacity_factor is not None,
            "capacity_factor must be null: experts choose the tokens that top_k gives each of them on average",
            "remove capacity_factor, and give top_k the tokens that an expert takes over an even share",
        ),
        *(
            (
                f".losses.{name}",
                router.select == "hash" and bool(getattr(moe.losses, name)),
                f"losses.{name} must be 0: a table chooses, and the loss would only change the experts' weights",
                f"use losses.{name}: 0 in this variant, or select: top_k",
            )
            for name in ("balance", "sequence")
        ),
    ):
        if wrong:
            yield at.problem(key, select, rule=rule, fix=fix)


def skipping_is_a_choice_of_one(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    moe, router = at.options, at.options.router
    if router.skip and (moe.top_k > 1 or router.select != "top_k" or router.groups > 1):
        yield at.problem(
            ".router.skip .top_k .router.select",
            rule="skip must go with a choice of one expert, not within groups",
            fix="use top_k: 1, select: top_k and no groups, or skip: false",
        )
    if router.skip and moe.capacity_factor is not None:
        yield at.problem(
            ".capacity_factor .router.skip",
            rule="capacity_factor must be null: tokens that use no expert are computed, too, and would take places",
            fix="remove capacity_factor, or use skip: false",
        )


def idle_moe_options(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    moe = at.options
    if moe.shared_gate and not moe.shared_size:
        yield at.warning(
            ".shared_gate .shared_size",
            rule="shared_gate must go with a shared expert, and there is none",
            fix="give shared_size, or remove shared_gate",
        )
    rate = ".router.correction_rate"
    if moe.router.correction == "none" and at.given(rate):
        yield at.warning(
            rate,
            ".router.correction",
            rule="correction_rate must go with a correction",
            fix="use correction: sign, or remove the rate",
        )


def routers_learn(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    moe = at.options
    if moe.top_k == 1 and moe.router.normalize:
        yield at.warning(
            ".router.normalize .top_k",
            rule="normalize must be false with top_k 1: the weight is always 1 and gives the router no gradient",
            fix="use normalize: false, or a larger top_k",
        )


def own_norms_follow_a_norm(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    moe, model = at.options, at.config.model
    before = model.residual.form == "sequential" and model.residual.norm in ("pre", "both", "sandwich")
    if moe.own_norms and not (before and model.norm.type == "rmsnorm"):
        yield at.problem(
            ".own_norms",
            *("model.residual.norm", "model.residual.form", "model.norm.type"),
            rule="own_norms must go with an RMSNorm before each layer of a sequential stream, whose vectors they have",
            fix="use model.norm.type=rmsnorm, model.residual.form=sequential and model.residual.norm=both",
        )
    if moe.own_norms and not moe.shared_size:
        yield at.problem(
            ".own_norms .shared_size",
            rule="own_norms must go with a shared expert, whose output has one of the norms",
            fix="give shared_size, or use own_norms: false",
        )
    for name, given in (("own_norms", moe.own_norms), ("router.expert_scale", moe.router.expert_scale)):
        if given and moe.router.network != "linear":
            yield at.problem(
                f".{name} .router.network",
                rule=f"{name} must go with a linear router: an MLP router has its own norm",
                fix=f"use router: {{network: linear}}, or remove {name}",
            )
    if moe.router.expert_scale and moe.router.select == "expert_choice":
        yield at.problem(
            ".router.expert_scale .router.select",
            rule="expert_scale must go with tokens that choose their experts",
            fix="use select: top_k, or remove expert_scale",
        )


def experts_divide_over_expert_ranks(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    experts, parallel = at.options.experts, at.config.parallel
    name = "depth" if parallel.expert == 1 else "expert"
    ranks = getattr(parallel, name)
    if experts % ranks:
        each = "expert parallel rank" if name == "expert" else "rank of parallel.depth"
        yield at.problem(
            f".experts parallel.{name}",
            rule=f"each {each} must have the same number of experts",
            fix=f"use {multiples(experts, ranks)} experts, or parallel.{name} = {near(ranks, divisors(experts))}",
        )


def rows_are_aligned(context: RuleContext) -> Iterator[Problem]:
    """Rows of torch's grouped matrix products must start at multiples of 16 bytes."""
    compute, width = context.config.precision.compute, context.config.model.hidden_size
    unit, columns = 16 // SIZES[compute], context.config.parallel.columns
    own, parts = ("parallel.columns",) * (columns > 1), f" on each of {columns} columns" * (columns > 1)
    if context.uses("moe") and width % (unit * columns):
        yield context.problem(
            "model.hidden_size precision.compute",
            *own,
            rule="model.hidden_size must be a multiple of 16 bytes for the grouped products of a moe layer, "
            f"{unit} channels in {compute}{parts}",
            fix=f"use {multiples(width, unit * columns)} channels",
        )


def router_states_have_a_first(context: RuleContext) -> Iterator[Problem]:
    """The first MLP router has nothing to average with. All others carry states of one width."""
    routers = [use for use in context.layers("moe") if use.options.router.network == "mlp"]
    if routers and routers[0].options.router.average:
        yield routers[0].problem(
            ".router.average model.layers",
            rule="the first MoE layer with an MLP router must not average: there is no router state before it",
            fix="name a variant there, as in 'attention/moe@first (attention/moe) x7' with model.variants.first: "
            "{router: {average: false}}",
        )
    if len({use.options.router.width for use in routers}) > 1:
        yield context.problem(
            "model.moe.router.width model.layers",
            rule="all routers must have one width, since their states are carried on",
            fix="give no variant a width of its own",
        )


def router_states_are_whole_blocks(context: RuleContext) -> Iterator[Problem]:
    """The state goes to another stage in blocks of its own."""
    routers = [use for use in context.layers("moe") if use.options.router.network == "mlp"]
    parallel = context.config.parallel
    if not routers or not sends_blocks(parallel):
        return
    width = routers[0].options.router.width
    # whole on every tensor parallel rank, also where a rank has a part of the hidden state's positions
    if width * (parallel.tensor if parallel.sequence else 1) % LEAST_BLOCK:
        yield routers[0].problem(
            ".router.width",
            PIPELINE,
            rule=f"the state of a router must have a multiple of {LEAST_BLOCK} channels to travel as int8_block",
            fix=f"use {multiples(width, LEAST_BLOCK)} channels, or compress.pipeline=bf16",
        )


def token_ids_travel_whole(context: RuleContext) -> Iterator[Problem]:
    """Their digits go through pipeline stages as floats of the stream's type."""
    uses = [use for use in context.layers("moe") if use.options.router.select == "hash"]
    if uses and context.config.parallel.pipeline > 1 and sends_blocks(context.config.parallel):
        yield uses[0].problem(
            ".router.select",
            PIPELINE,
            rule="token ids must travel exactly, and int8_block rounds them",
            fix="use parallel.communication.compress.pipeline=bf16, or select: top_k",
        )


def further_tokens_have_no_router_state(context: RuleContext) -> Iterator[Problem]:
    """A module that predicts further tokens has only the stream of the layers before it."""
    key, block = "model.multi_token_prediction.block", context.further_block
    for each in block.kinds if block else ():
        uses = [use for use in context.layers("moe") if (use.kind, use.variant) == (each.name, each.variant)]
        if uses and uses[0].options.router.network == "mlp":
            yield context.problem(
                key,
                "model.moe.router.network",
                rule="must have a linear router: an MLP router averages its state with the states of layers before it",
                fix="use a variant of moe with router: {network: linear}, which model.layers has too",
            )
        if uses and uses[0].options.router.select == "hash":
            yield context.problem(
                key,
                "model.moe.router.select",
                rule="must choose experts by their scores: token ids are not handed on to it",
                fix="use a variant of moe with router: {select: top_k}, which model.layers has too",
            )


# (option of the router, the option and its value that it must go with, reason)
_IDLE = (
    ("sinkhorn_iterations", "select", "sinkhorn", ", which balances in rounds"),
    ("sinkhorn_start", "select", "sinkhorn", ", which balances in rounds"),
    ("width", "network", "mlp", ": a linear router is one matrix"),
    ("average", "network", "mlp", ": a linear router has no state"),
    ("bias", "network", "linear", ": an MLP router's layers have their own biases"),
)


def options_that_nothing_reads(context: RuleContext) -> Iterator[Problem]:
    """Options given for all moe layers that none of them reads, each with the option that makes it idle."""
    used = [use.options for use in context.layers("moe")]
    for name, other, value, why in _IDLE:
        key = f"model.moe.router.{name}"
        if used and context.given(key) and all(getattr(moe.router, other) != value for moe in used):
            yield context.warning(
                key,
                f"model.moe.router.{other}",
                rule=f"must go with {other}: {value}{why}",
                fix=f"use {other}: {value}, or remove {name}",
            )
    if used and context.given("model.moe.losses.over") and not any(moe.losses.balance for moe in used):
        yield context.warning(
            "model.moe.losses.over model.moe.losses.balance",
            rule="losses.over must go with a balancing loss, and there is none",
            fix="give losses.balance a coefficient, or remove over",
        )


def tokens_choose_by_themselves(at: KindUse[MoEOptions]) -> Iterator[Problem]:
    """Where tokens compete for experts, only tokens of one rank or chunk would compete, and the result depend on the
    cut."""
    cuts = (
        ("parallel.context", at.config.parallel.context, "context parallelism", "rank"),
        ("training.sequence_chunks", at.config.training.sequence_chunks, "sequence_chunks", "chunk"),
    )
    for key, count, name, part in cuts:
        if count > 1 and at.options.capacity_factor is not None:
            yield at.problem(
                ".capacity_factor",
                key,
                rule=f"must be none with {name}: each {part} would drop tokens by the load of its own part",
                fix=f"remove capacity_factor, or use {key}=1",
            )
        if count > 1 and at.options.router.select not in ("top_k", "hash"):
            yield at.problem(
                ".router.select",
                key,
                rule=f"must be top_k or hash with {name}: tokens of a whole micro-batch compete, which no {part} has",
                fix=f"use router.select: top_k, or {key}=1",
            )


# Rules of one use of the kind.
RULES = (
    top_k_of_the_experts,
    gates_are_there_to_be_cut,
    groups_are_equal,
    widths_are_cut_and_aligned,
    balancers_fit_the_choice,
    idle_moe_options,
    routers_learn,
    skipping_is_a_choice_of_one,
    own_norms_follow_a_norm,
    experts_divide_over_expert_ranks,
    divides_over_tensor_ranks("shared_size", "channels of the shared expert"),
    tokens_choose_by_themselves,
)

# Rules of the whole stack, and of the layout with or without experts in it.
STACK_RULES = (
    rows_are_aligned,
    options_that_nothing_reads,
    router_states_have_a_first,
    router_states_are_whole_blocks,
    token_ids_travel_whole,
    further_tokens_have_no_router_state,
    *LAYOUT_RULES,
)
