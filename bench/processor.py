"""The processor of a CPU benchmark, and its rate of matrix products."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

SIZE, REPEATS = 2048, 3  # of square matrices, large enough that more gains nothing, and products in a step
PRODUCTS = "products"  # their name among contenders
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # what decides the speed of matrix products


def processor() -> str:
    """Its name and the features that it has of `FEATURES`, in one line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    values = dict(reversed([(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]))
    flags = values.get("flags", values.get("Features", "")).split()
    name = values.get("model name", platform.machine())
    return f"{name} ({', '.join(each for each in FEATURES if each in flags) or 'none of ' + ', '.join(FEATURES)})"


class Products:
    """A contender whose step is only matrix products, in the type that the others compute in.

    Attributes:
        flops: of a step.
    """

    flops = REPEATS * 2 * SIZE**3

    def __init__(self, setup: Any):
        import torch

        self.torch, dtype = torch, torch.bfloat16 if setup.compute == "bf16" else torch.float32
        self.matrix = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.out = torch.empty_like(self.matrix)

    def step(self, step: int) -> tuple[float, float]:
        for _ in range(REPEATS):
            self.torch.mm(self.matrix, self.matrix, out=self.out)
        return 0.0, 0.0

    def close(self) -> None:
        pass
