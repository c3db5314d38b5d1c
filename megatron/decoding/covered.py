"""Models that the decoder reads, and models whose keys or values it can read in part. Without torch."""

from megatron.config import Config
from megatron.config.arithmetic.recurrence import core_of
from megatron.config.kind import kinds_of
from megatron.config.sections.output import ReadLessOptions
from megatron.config.variants import options_of, used_kinds


def obstacle(config: Config) -> str | None:
    """The reason why texts of such a run are read again for each token. None where the decoder reads them."""
    for _, kind, options in used_kinds(config.model):
        if kind.mixes_samples(options):
            return "a token's result depends on the other texts of its batch (experts with a capacity)"
        if kind.whole:
            return "a class of transformers has no states that can be copied"
        rotary = getattr(options, "rotary", None)
        if rotary is not None and rotary.scaling.type == "dynamic":
            return "positions turn by the length of the text (rotary.scaling.type dynamic)"
    return None


def cannot_read_less(config: Config) -> str | None:
    """The reason why the layers of a model cannot read fewer keys or values. None where they can."""
    if (reason := obstacle(config)) is not None:
        return reason
    if core_of(config.model.blocks):
        return "passes of a recurrent core have keys of their own"
    for name, kind, options in used_kinds(config.model):
        if getattr(options, "kv_rank", None) is not None:
            return f"{name} keeps latents, which all heads share, in place of keys"
        if not kind.attends and kind.context != "attends":
            continue
        sizes = (getattr(options, name, None) for name in ("kv_heads", "head_dim"))
        if kind.context != "attends" or None in sizes:
            return f"{name} has keys of another form"
        if getattr(options, "window", None) is not None:
            return f"{name} has a sliding window, which reads few keys already"
        if getattr(options, "softcap", None) is not None or getattr(options, "sinks", False):
            return f"{name} changes its logits (softcap or sinks), and thresholds and choices are of plain logits"
        if getattr(options, "position", None) == "alibi":
            return f"{name} adds ALiBi's terms to its logits, and keys are chosen by products only"
    return None if heads_of(config) else "no layer keeps keys: recurrences have a state of one size"


def heads_of(config: Config) -> list[tuple[int, int, int]]:
    """Query heads, key/value heads and their channels of each layer with keys, in the order of the decoder's states."""
    kinds = kinds_of(tuple(config.model.extensions))
    layers = [each for block in config.model.blocks for each in block.kinds if kinds[each.name].context == "attends"]
    own = [options_of(config.model, each) for each in layers]
    return [(each.heads, each.kv_heads, each.head_dim) for each in own]


def evaluation_problem(config: Config) -> str | None:
    """A sentence about `evaluation.exact` or `evaluation.read_less` that such a run cannot have."""
    own, less = config.evaluation, config.evaluation.read_less
    if own.placement is not None and (reason := _cannot_stay(config)) is not None:
        return f"evaluation.placement cannot be used: {reason}"
    if own.exact and (reason := obstacle(config)) is not None:
        return f"evaluation.exact must be false where the decoder does not read the model: {reason}"
    if less.loki is not None and less.sift is not None:
        return "evaluation.read_less must have loki or sift, not both: one reads fewer keys, the other all"
    unused = {"rank": less.loki, "keys": less.loki, "warmup": less.sift}
    for name, way in unused.items():
        if way is None and getattr(less, name) != getattr(ReadLessOptions(), name):
            return f"evaluation.read_less.{name} must come with {'sift' if name == 'warmup' else 'loki'}, or be removed"
    if not less.asked:
        return None
    if (reason := cannot_read_less(config)) is not None:
        return f"evaluation.read_less must be empty with this model, which cannot read less: {reason}"
    if less.loki is not None and config.parallel.pipeline > 1:
        return "evaluation.read_less.loki must be without pipeline stages. Evaluate with parallel.pipeline=1"
    wrong = [name for name in ("rank", "keys") if getattr(less, name) > 1 and getattr(less, name) % 1]
    if wrong:
        return f"evaluation.read_less.{wrong[0]} must be a share below 1 or a whole number"
    if less.rank == 1:
        return "evaluation.read_less.rank must be a share below 1 or a number above 1. Without loki all are used"
    return None


def _cannot_stay(config: Config) -> str | None:
    """The reason why decoded tokens cannot stay with their experts."""
    residual, parallel, kinds = config.model.residual, config.parallel, kinds_of(tuple(config.model.extensions))
    if (reason := obstacle(config)) is not None:
        return reason
    used = [(kinds[each.name], options_of(config.model, each)) for b in config.model.blocks for each in b.kinds]
    if not any(kind.stays for kind, _ in used):
        return "the model must have layers with experts"
    if not any(kind.context == "attends" for kind, _ in used):
        return "the model must have layers with keys"
    if any(kind.context not in ("attends", "alone") or kind.neighbours for kind, _ in used):
        return "layers must be attention and feed-forwards, since states of recurrences would have to move too"
    if any(len(each.mixers) > 1 or each.side or each.recurrent for each in config.model.blocks):
        return "a layer must have at most one mixer, without side layers, and be outside of a recurrent core"
    if residual.form != "sequential" or residual.norm not in ("pre", "both", "sandwich") or residual.streams > 1:
        return "model.residual must be sequential, with norms before branches and one row"
    if any(getattr(options, "keys", "own") != "own" for _, options in used):
        return "layers must have keys of their own: keys of earlier layers would have to move too"
    if residual.token_inputs:
        return "model.residual.token_inputs must be 0: ids of tokens would have to move too"
    if any(kind.stays and options.router.network != "linear" for kind, options in used):
        return "routers must be linear: a state of MLP routers would have to move too"
    if any(kind.stays and options.router.select == "hash" for kind, options in used):
        return "routers must choose by scores (router.select is hash): ids of tokens would have to move too"
    others = ("tensor", "columns", "depth", "pipeline", "context")
    if parallel.expert < 2 or parallel.sequence or any(getattr(parallel, name) > 1 for name in others):
        return "the layout must have expert parallel ranks only (parallel.expert=N on N ranks)"
    return "evaluation.read_less must be empty" if config.evaluation.read_less.asked else None
