"""Hooks: one file per concern of a run in addition to its steps."""

from megatron.config.features.feature import in_order, wanted_features
from megatron.config.parts import build_added
from megatron.config.registry import HOOK, INSIDE, load

from ..hook import Hook, HookContext

LAST = "levels"  # this hook and later ones save the state


def hooks_of(parts: HookContext) -> list[Hook]:
    """The hooks that a run asks for, in the order in which they act after a step.

    Hooks that may end the run come first, then reports, then the user's own, then hooks that save. So a bad loss is
    never saved, a stopped run is, and the records about a checkpoint's weights are written before it.

    Raises:
        UserError: a hook of the user's cannot be made.
    """
    hooks: list[Hook | None] = []
    features = {name: each for name, each in wanted_features(parts.config).items() if each.hook}
    for name in in_order(INSIDE[HOOK], {name: each.hook_before for name, each in features.items()}, LAST):
        if name == LAST:
            hooks += build_added(parts.config, "hooks", HOOK, parts.config.hooks, kind=Hook)
        hooks.append(load(features[name].hook if name in features else INSIDE[HOOK][name]).of(parts))
    return [hook for hook in hooks if hook is not None]
