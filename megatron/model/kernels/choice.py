"""Choice of the implementation of a kind of layer: plain torch, or a package of fused kernels.

A mixer with an adapter calls `choose_kernels` once, when it is built, and keeps torch for decoding and gradients
through states. Torch is the tested default and needs no package. `model.kernels` names the choice.

FlashAttention 3 in place of torch's own kernels, where a run asks for it (`model.fused_attention.flash: fa3`).

torch has no kernels of FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608), but can call its package
(`flash_attn_interface`), only on Hopper. That is a setting of the process."""

from __future__ import annotations

import re
from importlib import metadata

import torch

from megatron.config import Config
from megatron.config.arithmetic.machine import FA3, FA3_FIX, installed
from megatron.config.kind import LayerKind, kinds_of

HOPPER = 9  # compute capability


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
    able = [name for name in packages if wanted in (name, "auto")]
    if not able:
        return "torch", f"no adapter of this kind to {'any package' if wanted == 'auto' else wanted}"
    if torch.device(device).type != "cuda":
        return "torch", f"{' and '.join(able)} {'needs' if len(able) == 1 else 'need'} a GPU"
    there = [name for name in able if installed(name)]
    found = [name for name in there if wanted != "auto" or name != "fla" or _fla_computes_gradients(device)]
    if found:
        return found[0], f"model.kernels: {wanted}"
    if there:
        return "torch", "auto skips fla: on Hopper it rejects gradients with Triton 3.4 to 3.7.0"
    if wanted == "auto":
        return "torch", f"not installed: {', '.join(able)}"
    raise ModuleNotFoundError(f"model.kernels: {wanted} is not installed on this host: {packages[wanted]}")


def _fla_computes_gradients(device: torch.device | str) -> bool:
    """Whether flash-linear-attention has a backward pass here. That of its kernels with one decay per head is wrong
    with some versions of Triton, which it then rejects in the first step."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return True
    try:
        numbers = tuple(map(int, re.findall(r"\d+", metadata.version("triton"))[:3]))
    except metadata.PackageNotFoundError:
        return True
    return torch.cuda.get_device_capability(device)[0] != HOPPER or not (3, 4) <= numbers < (3, 7, 1)


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
            choice = ("torch", "ranks that share a sequence need states before their tokens, which no package takes")
        chosen.setdefault(choice, []).append(kind)
    return [f"kernels of {', '.join(names)}: {choice} ({reason})" for (choice, reason), names in chosen.items()]


def use_flash_attention(wanted: str, device: torch.device | str) -> None:
    """Set torch's FlashAttention of this process to `model.fused_attention.flash`.

    Raises:
        ValueError: this GPU, or this torch, cannot.
        ModuleNotFoundError: the package is not installed here.
    """
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():  # there is none, or tensors have no values
        return
    from torch.nn import attention

    active = getattr(attention, "current_flash_attention_impl", lambda: None)()
    if wanted == "auto":
        if active == "FA3":  # of another model of this process
            attention.restore_flash_attention_impl()
        return
    if active == "FA3":
        return
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != HOPPER:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"model.fused_attention.flash: fa3 must have GPUs of Hopper (sm_90), unlike {name}: use auto")
    if "FA3" not in getattr(attention, "list_flash_attention_impls", list)():
        raise ValueError(
            f"model.fused_attention.flash: fa3 must have a torch that can call it (2.13), unlike {torch.__version__}: "
            "use auto"
        )
    if not installed(FA3):
        raise ModuleNotFoundError(f"model.fused_attention.flash: fa3 is not installed on this host: {FA3_FIX}")
    attention.activate_flash_attention_impl("FA3")


def describe_flash_attention(config: Config, device: torch.device | str) -> list[str]:
    """One line per choice that was made by name."""
    options, on_gpu = config.model.fused_attention, torch.device(device).type == "cuda"
    lines = []
    if options.flash == "fa3":
        what = "FlashAttention 3" if on_gpu else "torch (fa3 needs a GPU)"
        lines.append(f"plain causal attention: {what}")
    if options.documents == "varlen":
        most = options.most_documents
        kernels = f"FlashAttention of variable lengths, {most} a sample at most"
        what = kernels if on_gpu else "masks (varlen needs a GPU)"
        lines.append(f"attention of documents: {what}")
    return lines
