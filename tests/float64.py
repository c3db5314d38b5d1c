"""Computing in float64, where equal results have no room for luck.

A difference between two programs shows far above 1e-10, and rounding far below.

Models of the project follow the type of their parameters (`build_model(config, dtype=torch.float64)`). Other people's
have fp32 written into them. `wider` makes those places float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

DOUBLE = torch.float64
EXACT = 1e-10  # relative. Sums of float64 in another order differ by 1e-15 to 1e-12.
# Where a program is fp32 and stays so. Two ways to add up a small model's sums differ by 1e-7 to 3e-6 of its logits, on
# any processor, and the least wrong option by a hundredth.
FP32 = 1e-4


class wider(TorchFunctionMode):
    """Within it, whatever asks torch for fp32 gets float64: `x.float()`, `x.to(torch.float32)`, a `dtype`."""

    def __torch_function__(self, function, types, args=(), kwargs=None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args, kwargs = tree_map_only(torch.dtype, _wider, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __enter__(self):
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(DOUBLE)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(self.default)
        return super().__exit__(*error)


def _wider(dtype: torch.dtype) -> torch.dtype:
    return DOUBLE if dtype == torch.float32 else dtype
