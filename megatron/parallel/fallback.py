"""Functions compiled by torch, and the plain ones where the compiler fails."""

from collections.abc import Callable
from typing import Any, TypeVar
from warnings import warn

import torch

T = TypeVar("T")


class Fallback:
    """Runs compiled functions, and the plain ones from the first time that the compiler fails, with one warning.

    Args:
        what: is compiled, for the warning.

    Attributes:
        failed: whether the compiler has failed for one of the functions. All of them then run uncompiled.
    """

    def __init__(self, what: str) -> None:
        self.what, self.failed = what, False

    def of(self, fast: Callable[..., T], plain: Callable[..., T]) -> Callable[..., T]:
        def call(*inputs: Any, **options: Any) -> T:
            if not self.failed:
                try:
                    return fast(*inputs, **options)
                except torch._dynamo.exc.TorchDynamoException as error:
                    self.failed = True
                    reason = " ".join(str(error).split())[:160]
                    warn(f"torch.compile failed, so {self.what}: {type(error).__name__}: {reason}", stacklevel=2)
            return plain(*inputs, **options)

        return call


def lower_backward_at_once() -> None:
    """Compile backward passes with their forward pass, where a failure is caught, and not when they first run."""
    from torch._functorch import config

    config.force_non_lazy_backward_lowering = True
