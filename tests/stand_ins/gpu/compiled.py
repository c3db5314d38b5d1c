"""Kernels of flash-linear-attention behind the adapters, compiled for a GPU of NVIDIA's and one of AMD's.

    python -m tests.stand_ins.gpu.compiled      in the environment of `build.build`. Prints a line of JSON

Each runs forward and backward on the stand-in, with the first configuration of each autotuner.
"""

from __future__ import annotations

import json
from typing import Any

AMD = ("hip", "gfx942", 64)


def use_first_configurations() -> None:
    """Autotuning would compile each configuration, and time it on a device that computes nothing."""
    from triton.runtime import autotuner

    made = autotuner.Autotuner.__init__

    def first(self: Any, fn: Any, arg_names: Any, configs: Any, *arguments: Any, **options: Any) -> None:
        made(self, fn, arg_names, configs[:1], *arguments, **options)

    autotuner.Autotuner.__init__ = first


def main() -> None:
    import torch
    import triton.compiler
    from triton.backends.compiler import GPUTarget

    from tests.kinds.test_kernels_in_values import KINDS

    compile, found = triton.compiler.compile, dict[str, dict[str, str]]()
    use_first_configurations()

    def for_both(source: Any, target: Any = None, options: Any = None, **rest: Any) -> Any:
        """The function that Triton calls to compile for its GPU."""
        nvidia = compile(source, target=target, options=options, **rest)
        results = {f"sm_{target.arch}": "compiled" if nvidia.asm["cubin"] else "nothing"}
        chosen = {name: options[name] for name in ("num_warps", "num_stages")}
        try:
            amd = compile(source, target=GPUTarget(*AMD), options=chosen)
            results[AMD[1]] = "compiled" if amd.asm["hsaco"] else "nothing"
        except Exception as error:
            results[AMD[1]] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        found[source.name] = results
        return nvidia

    triton.compiler.compile = for_both
    for kind in KINDS.values():
        kernel, _, inputs = kind()
        leaves = [each.to("cuda", torch.bfloat16).requires_grad_() for each in inputs]
        y = kernel(*leaves, chunk=16, starts_BS=None)[0]
        torch.autograd.grad(y.float().sum(), leaves)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
