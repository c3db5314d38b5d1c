"""Layers over the methods of `ProcessGroup`, in which all collectives end, also of DeepSpeed and of backward passes.

A layer wraps some of the methods while it is installed. The choice of an algorithm comes before the account, in every
order of installation, so that the account counts the messages that are sent. Shared memory comes after it: it is
another way for the same message."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import ProcessGroup

ROUTES, ACCOUNT, SHARED = "routes", "account", "shared memory"
_ORDER = (SHARED, ACCOUNT, ROUTES)  # from the group outwards

Wrap = Callable[[str, Callable], Callable]
_layers: dict[str, tuple[frozenset[str], Wrap]] = {}
_plain: dict[str, Any] = {}


def intercept(layer: str, methods: Iterable[str], wrap: Wrap) -> None:
    """Call `wrap(method, inner)` in place of these methods. Methods that torch lacks are skipped.

    Raises:
        RuntimeError: the layer is installed already.
    """
    if layer in _layers:
        raise RuntimeError(f"the {layer} of communication is installed already")
    _layers[layer] = frozenset(methods) & frozenset(vars(ProcessGroup)), wrap
    _rebuild()


def release(layer: str) -> None:
    """Remove a layer."""
    if _layers.pop(layer, None) is not None:
        _rebuild()


def original(method: str) -> Callable:
    """The method of torch, below all layers."""
    return _plain.get(method) or getattr(ProcessGroup, method)


def complete(result: Any) -> Work:
    """The handle of a complete operation."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    work: Work = getattr(torch._C._distributed_c10d, "_create_work_from_future")(future)  # noqa: B009
    return work


def _rebuild() -> None:
    for method, plain in _plain.items():
        setattr(ProcessGroup, method, plain)
    _plain.clear()
    for layer in _ORDER:
        if layer in _layers:
            methods, wrap = _layers[layer]
            for method in methods:
                _plain.setdefault(method, vars(ProcessGroup)[method])  # `getattr` would lose that it is a method
                setattr(ProcessGroup, method, wrap(method, getattr(ProcessGroup, method)))
