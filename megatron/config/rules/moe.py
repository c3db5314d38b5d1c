"""What a mixture of experts needs: experts to choose from, groups of equal size, widths that can be cut."""

from __future__ import annotations

from collections.abc import Iterator

from ..facts import Facts
from ..problems import Problem
from ..variants import options_of
from .model import divisors, kind_options, near, section_key

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def moe_options(facts: Facts) -> Iterator[tuple[str, object]]:
    """The options of each moe layer of the pattern, with the prefix of their keys."""
    return kind_options(facts, "moe")


def _key(facts: Facts, prefix: str, name: str) -> str:
    return section_key(facts, prefix, name, "moe")


def _router_key(facts: Facts, prefix: str, name: str) -> str:
    """The same for an option of the router."""
    own = {} if prefix == "model.moe" else facts.config.model.variants[prefix.rsplit(".", 1)[1]]
    return f"{prefix if name in own.get('router', {}) else 'model.moe'}.router.{name}"


def top_k_of_the_experts(facts: Facts) -> Iterator[Problem]:
    for prefix, moe in moe_options(facts):
        if moe.top_k > moe.experts:
            yield facts.problem(
                _key(facts, prefix, "top_k"),
                _key(facts, prefix, "experts"),
                rule="a token cannot use more experts than there are",
                fix=f"use at most {moe.experts}, or more experts",
            )


def groups_are_equal(facts: Facts) -> Iterator[Problem]:
    for prefix, moe in moe_options(facts):
        router, groups = moe.router, _router_key(facts, prefix, "groups")
        if moe.experts % router.groups:
            yield facts.problem(
                groups,
                _key(facts, prefix, "experts"),
                rule="the groups have equal numbers of experts",
                fix=f"use {near(router.groups, divisors(moe.experts))} groups",
            )
        elif router.top_groups > router.groups:
            yield facts.problem(
                _router_key(facts, prefix, "top_groups"),
                groups,
                rule="a token cannot choose from more groups than there are",
                fix=f"use at most {router.groups}",
            )
        elif moe.top_k <= moe.experts and moe.top_k > router.top_groups * (moe.experts // router.groups):
            yield facts.problem(
                _key(facts, prefix, "top_k"),
                _router_key(facts, prefix, "top_groups"),
                groups,
                rule=f"the groups that a token may choose from have "
                f"{router.top_groups * (moe.experts // router.groups)} experts",
                fix="use a smaller top_k, more top_groups, or fewer groups",
            )


def widths_are_cut_and_aligned(facts: Facts) -> Iterator[Problem]:
    """torch's grouped matrix products want rows that start at multiples of 16 bytes."""
    parallel, compute = facts.config.parallel, facts.config.precision.compute
    unit, ranks = 16 // BYTES[compute], parallel.expert_tensor
    cut = "parallel.expert_tensor" if facts.given("parallel.expert_tensor") else "parallel.tensor"
    if facts.uses("moe") and facts.config.model.hidden_size % unit:
        yield facts.problem(
            "model.hidden_size",
            "precision.compute",
            rule=f"the grouped products of a moe layer need a multiple of 16 bytes, {unit} channels in {compute}",
            fix=f"use {_multiples(facts.config.model.hidden_size, unit)} channels",
        )
    for prefix, moe in moe_options(facts):
        if moe.hidden_size % (ranks * unit):
            yield facts.problem(
                _key(facts, prefix, "hidden_size"),
                cut,
                "precision.compute",
                rule="each tensor parallel rank has the same share of an expert's channels, "
                f"a multiple of 16 bytes ({unit} channels in {compute})",
                fix=f"use {_multiples(moe.hidden_size, ranks * unit)} channels",
            )
        if moe.shared_size % parallel.tensor:
            yield facts.problem(
                _key(facts, prefix, "shared_size"),
                "parallel.tensor",
                rule="each tensor parallel rank has the same share of the shared expert's channels",
                fix=f"use {_multiples(moe.shared_size, parallel.tensor)} channels",
            )


def _multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return " or ".join(str(each) for each in (below, below + unit) if each)


def balancers_fit_the_choice(facts: Facts) -> Iterator[Problem]:
    for prefix, moe in moe_options(facts):
        router, select = moe.router, _router_key(facts, prefix, "select")
        if router.select == "expert_choice":
            yield facts.warning(
                select,
                rule="experts choose among all tokens of a micro-batch, later ones included: the model is not causal, "
                "and what it generates is not what it was trained on",
                fix="use select: top_k, but for studies of the method",
            )
        if router.select != "top_k" and router.correction != "none":
            yield facts.problem(
                _router_key(facts, prefix, "correction"),
                select,
                rule=f"{router.select} evens the load by itself",
                fix="use correction: none, or select: top_k",
            )
        if router.select != "top_k" and router.top_groups < router.groups:
            yield facts.problem(
                _router_key(facts, prefix, "top_groups"),
                select,
                rule=f"{router.select} knows no groups",
                fix="leave groups and top_groups out, or use select: top_k",
            )
        if router.select == "expert_choice" and router.normalize:
            yield facts.problem(
                _router_key(facts, prefix, "normalize"),
                select,
                rule="a token that several experts have chosen does not know of all of them, so nothing can be "
                "normalised",
                fix="use normalize: false",
            )
        if router.select == "expert_choice" and moe.capacity_factor is not None:
            yield facts.problem(
                _key(facts, prefix, "capacity_factor"),
                select,
                rule="experts choose as many tokens as top_k gives each of them on average, and nothing is dropped",
                fix="leave capacity_factor out, and give top_k the tokens that an expert takes over an even share",
            )


def router_states_have_a_first(facts: Facts) -> Iterator[Problem]:
    """The first MLP router has nothing to average with; all others carry states of one width."""
    routers = [
        (kind.variant, options_of(facts.config.model, kind).router)
        for block in facts.blocks
        for kind in block.kinds
        if kind.name == "moe" and (kind.variant is None or kind.variant in facts.config.model.variants)
    ]
    routers = [(variant, router) for variant, router in routers if router.network == "mlp"]
    if routers and routers[0][1].average:
        prefix = "model.moe" if routers[0][0] is None else f"model.variants.{routers[0][0]}"
        yield facts.problem(
            _router_key(facts, prefix, "average"),
            "model.layers",
            rule="the first MoE layer with an MLP router has no router state before it",
            fix="name a variant there, as in 'attention/moe@first (attention/moe) x7' with model.variants.first: "
            "{router: {average: false}}",
        )
    if len({router.width for _, router in routers}) > 1:
        yield facts.problem(
            "model.moe.router.width",
            "model.layers",
            rule="router states are carried on, so all have one width",
            fix="give no variant a width of its own",
        )


def skipping_is_a_choice_of_one(facts: Facts) -> Iterator[Problem]:
    for prefix, moe in moe_options(facts):
        router = moe.router
        if router.skip and (moe.top_k > 1 or router.select != "top_k" or router.groups > 1):
            yield facts.problem(
                _router_key(facts, prefix, "skip"),
                _key(facts, prefix, "top_k"),
                _router_key(facts, prefix, "select"),
                rule="a token that uses no expert chooses none beside it, and not within groups",
                fix="use top_k: 1, select: top_k and no groups, or skip: false",
            )
        if router.skip and moe.capacity_factor is not None:
            yield facts.problem(
                _key(facts, prefix, "capacity_factor"),
                _router_key(facts, prefix, "skip"),
                rule="tokens that use no expert are computed beside the others, and would take their places",
                fix="leave capacity_factor out, or use skip: false",
            )


def idle_moe_options(facts: Facts) -> Iterator[Problem]:
    for prefix, moe in moe_options(facts):
        if moe.shared_gate and not moe.shared_size:
            yield facts.warning(
                _key(facts, prefix, "shared_gate"),
                _key(facts, prefix, "shared_size"),
                rule="there is no shared expert to gate",
                fix="give shared_size, or leave shared_gate out",
            )
        rate = _router_key(facts, prefix, "correction_rate")
        if moe.router.correction == "none" and facts.given(rate):
            yield facts.warning(
                rate,
                _router_key(facts, prefix, "correction"),
                rule="nothing is corrected",
                fix="use correction: sign, or leave the rate out",
            )


def routers_learn(facts: Facts) -> Iterator[Problem]:
    for prefix, moe in moe_options(facts):
        if moe.top_k == 1 and moe.router.normalize:
            yield facts.warning(
                _router_key(facts, prefix, "normalize"),
                _key(facts, prefix, "top_k"),
                rule="a score over itself: the weight of the expert is always 1, and the loss gives the router no "
                "gradient",
                fix="use normalize: false, or a larger top_k",
            )


# (option of model.moe, the one that makes it work, what the values of that one are, what is so without, fix)
_IDLE = (
    (
        "router.sinkhorn_iterations",
        "router.select",
        ("sinkhorn",),
        "nothing is balanced in rounds",
        "use select: sinkhorn",
    ),
    ("router.sinkhorn_start", "router.select", ("sinkhorn",), "nothing is balanced in rounds", "use select: sinkhorn"),
    ("router.width", "router.network", ("mlp",), "the router is one matrix", "use network: mlp"),
    ("router.average", "router.network", ("mlp",), "the router is one matrix, without a state", "use network: mlp"),
    ("router.bias", "router.network", ("linear",), "the router's layers have their own biases", "use network: linear"),
)


def options_that_nothing_reads(facts: Facts) -> Iterator[Problem]:
    """Options given for all moe layers that none of them reads, each beside the one that makes it idle."""
    used = [moe for _, moe in moe_options(facts)]
    for name, other, values, rule, fix in _IDLE:
        if used and facts.given(f"model.moe.{name}") and all(_get(moe, other) not in values for moe in used):
            fix = f"{fix}, or leave {name.rsplit('.', 1)[-1]} out"
            yield facts.warning(f"model.moe.{name}", f"model.moe.{other}", rule=rule, fix=fix)
    if used and facts.given("model.moe.losses.over") and not any(moe.losses.balance for moe in used):
        yield facts.warning(
            "model.moe.losses.over",
            "model.moe.losses.balance",
            rule="there is no balancing loss",
            fix="give losses.balance a coefficient, or leave over out",
        )


def _get(moe: object, key: str) -> object:
    for name in key.split("."):
        moe = getattr(moe, name)
    return moe


def experts_divide_over_expert_ranks(facts: Facts) -> Iterator[Problem]:
    ranks = facts.config.parallel.expert
    for name in ("expert", "expert_tensor"):
        if facts.given(f"parallel.{name}") and _spreads(facts) and facts.blocks and not facts.uses("moe"):
            yield facts.problem(
                f"parallel.{name}",
                "model.layers",
                rule="there are no experts to spread over ranks",
                fix=f"leave parallel.{name} out, or use layers with a moe feed-forward",
            )
    for prefix, moe in moe_options(facts):
        if moe.experts % ranks:
            yield facts.problem(
                _key(facts, prefix, "experts"),
                "parallel.expert",
                rule="each expert parallel rank has the same number of experts",
                fix=f"use {_multiples(moe.experts, ranks)} experts, or parallel.expert = "
                f"{near(ranks, divisors(moe.experts))}",
            )


def _folds(facts: Facts) -> bool:
    """Whether tensor parallel ranks have whole experts."""
    return facts.config.parallel.expert_tensor == 1 < facts.config.parallel.tensor


def _spreads(facts: Facts) -> bool:
    return facts.config.parallel.expert > 1 or _folds(facts)


def experts_are_cut_or_whole(facts: Facts) -> Iterator[Problem]:
    parallel = facts.config.parallel
    if parallel.expert_tensor not in (1, parallel.tensor):
        either = "1" if parallel.tensor == 1 else f"1 or {parallel.tensor}"
        yield facts.problem(
            "parallel.expert_tensor",
            "parallel.tensor",
            rule="an expert is cut over all tensor parallel ranks, or is whole on each of them",
            fix=f"use parallel.expert_tensor = {either}",
        )


def expert_ranks_divide_their_line(facts: Facts) -> Iterator[Problem]:
    """Experts are spread over the data axis, or over data and tensor axes where no tensor parallel rank has a slice."""
    parallel, data = facts.config.parallel, facts.data_ranks
    if data is None:
        return
    folds = _folds(facts)
    line = data * parallel.tensor if folds else data
    if line % parallel.expert:
        sizes = [f"parallel.{name}" for name in ("tensor", "pipeline", "context") if getattr(parallel, name) > 1]
        where = "data and tensor parallel ranks of a stage" if folds else "data parallel ranks"
        why = "" if folds else "; tensor parallel ranks have slices of every expert of theirs"
        wider = "" if folds or data * parallel.tensor % parallel.expert else ", parallel.expert_tensor=1"
        yield facts.problem(
            "parallel.expert",
            *sizes,
            rule=f"experts are spread over the {where}, of which there are {line}{why}",
            fix=f"use parallel.expert = {near(parallel.expert, divisors(line))}{wider}, or another number of ranks",
        )


def spread_experts_fit_the_stage(facts: Facts) -> Iterator[Problem]:
    if _spreads(facts) and facts.config.zero.stage == 3:
        key = "parallel.expert_tensor" if _folds(facts) else "parallel.expert"
        yield facts.problem(
            "zero.stage",
            key,
            rule="ZeRO 3 cuts every parameter over all data parallel ranks, "
            "and expert parallel ranks have different parameters",
            fix=f"use zero.stage=1 or 2, or leave {key} out and let ZeRO 3 partition the experts",
        )


def folded_experts_want_equal_shards(facts: Facts) -> Iterator[Problem]:
    """DeepSpeed's ZeRO fills a bucket with gradients of all kinds and sends it when it is full. Ranks with other
    numbers of elements fill it at other parameters; where their experts' groups have several such ranks, they would
    wait for ever.
    """
    config = facts.config
    vocabulary, ranks = config.model.vocab_size, config.parallel.tensor
    if _folds(facts) and facts.uses("moe") and config.zero.stage in (1, 2) and vocabulary and vocabulary % ranks:
        yield facts.problem(
            "model.vocab_size",
            "parallel.tensor",
            "parallel.expert_tensor",
            "zero.stage",
            rule="folded experts' gradients are summed across tensor parallel ranks in ZeRO's buckets, so those "
            "ranks have equal "
            "numbers of parameters",
            fix=f"use model.vocab_size={-(-vocabulary // ranks) * ranks}, model.vocab_multiple={ranks}, "
            "or zero.stage=0",
        )


RULES = (
    top_k_of_the_experts,
    groups_are_equal,
    widths_are_cut_and_aligned,
    balancers_fit_the_choice,
    idle_moe_options,
    routers_learn,
    options_that_nothing_reads,
    router_states_have_a_first,
    skipping_is_a_choice_of_one,
    experts_divide_over_expert_ranks,
    experts_are_cut_or_whole,
    expert_ranks_divide_their_line,
    spread_experts_fit_the_stage,
    folded_experts_want_equal_shards,
)
