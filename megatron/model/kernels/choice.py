"""Choice of the implementation of a kind of layer: plain torch, or a package of fused kernels.

A mixer with an adapter calls `choose_kernels` once, when it is built, and keeps torch for decoding and gradients
through states. Torch is the tested default and needs no package. `model.kernels` names the choice.
"""

from __future__ import annotations

import torch

from megatron.config import Config
from megatron.config.arithmetic.machine import installed
from megatron.config.kind import LayerKind, kinds_of


def choose_kernels(wanted: str, kind: LayerKind, device: torch.device | str) -> tuple[str, str]:
    """The implementation of a kind of layer ("torch" or a package's name), and the reason.

    Args:
        wanted: `model.kernels`.

    Raises:
        ModuleNotFoundError: the named package is not installed here, on a device that would use it.
    """
    if wanted == "torch":
        return "torch", "model.kernels: torch"
    packages = kind.packages
    able = [name for name in packages if wanted == name or (wanted == "auto" and name not in kind.untried)]
    if not able:
        if wanted == "auto" and packages:
            return "torch", f"auto skips {', '.join(packages)}: not yet validated against torch on a GPU"
        return "torch", f"no adapter of this kind to {'any package' if wanted == 'auto' else wanted}"
    if torch.device(device).type != "cuda":
        return "torch", f"{' and '.join(able)} {'needs' if len(able) == 1 else 'need'} a GPU"
    found = [name for name in able if installed(name)]
    if found:
        return found[0], f"model.kernels: {wanted}"
    if wanted == "auto":
        return "torch", f"not installed: {', '.join(able)}"
    raise ModuleNotFoundError(f"model.kernels: {wanted} is not installed on this host: {packages[wanted]}")


def describe_kernels(config: Config, device: torch.device | str) -> list[str]:
    """One line per choice: which kinds of layers it computes, and why. Kinds without a package are skipped."""
    kinds = dict.fromkeys(kind.name for block in config.model.blocks for kind in block.kinds)
    chosen: dict[tuple[str, str], list[str]] = {}
    for kind in kinds:
        about = kinds_of(tuple(config.model.extensions))[kind]
        if not about.packages:
            continue
        choice = choose_kernels(config.model.kernels, about, device)
        if config.parallel.context > 1 and about.context in ("scans", "states") and choice[0] != "torch":
            choice = (
                "torch",
                "ranks that share a sequence need states before their tokens, which the packages do not accept",
            )
        chosen.setdefault(choice, []).append(kind)
    return [f"kernels of {', '.join(names)}: {choice} ({reason})" for (choice, reason), names in chosen.items()]
