"""Which implementation computes a kind of layer: plain torch, or a package of fused kernels. The one place that
decides.

A mixer with an adapter asks `choose` once, when it is built, and keeps torch for what the kernels cannot do (decoding,
gradients through states). Torch is the tested default and needs no package; `model.kernels` names the choice.
"""

from __future__ import annotations

import torch

from megatron.config import Config
from megatron.config.kernels import PACKAGES, installed
from megatron.config.pattern import parse


def choose(wanted: str, kind: str, device: torch.device | str) -> tuple[str, str]:
    """The implementation of a kind of layer ("torch" or a package's name), and the reason.

    Args:
        wanted: `model.kernels`.
        kind: as in the layer pattern.

    Raises:
        ModuleNotFoundError: the named package is not installed here, on a device that would use it.
    """
    if wanted == "torch":
        return "torch", "model.kernels: torch"
    able = [name for name, package in PACKAGES.items() if kind in package.kinds and wanted in ("auto", name)]
    if not able:
        return "torch", f"no adapter of {kind} to {'any package' if wanted == 'auto' else wanted}"
    if torch.device(device).type != "cuda":
        return "torch", f"{' and '.join(able)} {'needs' if len(able) == 1 else 'need'} a GPU"
    found = [name for name in able if installed(name)]
    if found:
        return found[0], f"model.kernels: {wanted}"
    if wanted == "auto":
        return "torch", f"not installed: {', '.join(able)}"
    raise ModuleNotFoundError(f"model.kernels: {wanted} is not installed on this host: {PACKAGES[wanted].fix}")


def describe_kernels(config: Config, device: torch.device | str) -> list[str]:
    """One line per choice: which kinds of layers it computes, and why. Kinds that only torch has are left out."""
    kinds = dict.fromkeys(kind.name for block in parse(config.model.layers) for kind in block.kinds)
    chosen: dict[tuple[str, str], list[str]] = {}
    for kind in kinds:
        if any(kind in package.kinds for package in PACKAGES.values()):
            chosen.setdefault(choose(config.model.kernels, kind, device), []).append(kind)
    return [f"kernels of {', '.join(names)}: {choice} ({reason})" for (choice, reason), names in chosen.items()]
