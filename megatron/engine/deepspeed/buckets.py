"""How DeepSpeed 0.19.8 cuts gradients into messages."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch import nn


def finished(layers: nn.Module) -> list[nn.Parameter]:
    """Parameters in the order in which the backward pass finishes their gradients: last used first.

    That is the reverse of `parameters()`, except for modules with parameters of their own and further modules
    inside. Their `uses` lists names, or first parts of names, in the order of use."""
    found: list[nn.Parameter] = []

    def visit(module: nn.Module) -> None:
        uses: tuple[str, ...] = getattr(module, "uses", ())
        if not uses:
            found.extend(module.parameters(recurse=False))
            for each in module.children():
                visit(each)
            return
        named = dict(module.named_parameters())
        places = {name: _place(name, uses) for name in named}
        found.extend(named[name] for name in sorted(named, key=lambda name: places[name]))

    visit(layers)
    return list(dict.fromkeys(found))[::-1]


def _place(name: str, uses: tuple[str, ...]) -> int:
    """Place of a parameter's name in `uses`. Other names come first."""
    return max((at for at, each in enumerate(uses) if f"{name}.".startswith(f"{each}.")), default=-1)


def buckets_after(sizes: Iterable[int], limit: int) -> list[int]:
    """Elements per message, if a bucket is sent as soon as it has more than `limit`. Larger tensors are sent
    separately."""
    sizes = list(sizes)
    messages, filled = [size for size in sizes if size > limit], 0
    for size in (each for each in sizes if each <= limit):
        filled += size
        if filled > limit:
            messages.append(filled)
            filled = 0
    return messages + [filled] * bool(filled)


def buckets_before(order: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Messages, if a bucket is sent before the next parameter would make it larger than `limit` elements."""
    messages: list[list[nn.Parameter]] = [[]]
    filled = 0
    for each in order:
        if filled and filled + each.numel() > limit:
            messages.append([])
            filled = 0
        messages[-1].append(each)
        filled += each.numel()
    return messages


def in_buckets(
    groups: Sequence[dict[str, Any]], limit: int, apart: Callable[[nn.Parameter], Hashable] | None = None
) -> list[dict[str, Any]]:
    """Parameter groups of at most `limit` elements, or one parameter. They are filled from the last parameter on, whose
    gradient is the first to be complete.

    Args:
        apart: parameters with different results share no group.
    """
    found: list[dict[str, Any]] = []
    for group in groups:
        kinds: dict[Hashable, list[nn.Parameter]] = {}
        for each in group["params"]:
            kinds.setdefault(None if apart is None else apart(each), []).append(each)
        parts = [part for kind in kinds.values() for part in buckets_before(kind[::-1], limit)[::-1]]
        for number, part in enumerate(parts):
            name = group["name"] if len(parts) == 1 else f"{group['name']}.{number}"
            found.append({**group, "params": part[::-1], "name": name})
    return found
