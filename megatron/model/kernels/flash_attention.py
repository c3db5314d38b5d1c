"""FlashAttention 3 in place of torch's own kernels, where a run asks for it (`model.fused_attention.flash: fa3`).

torch has no kernels of FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608), but can call its package
(`flash_attn_interface`), only on Hopper. That is a setting of the process.
"""

from __future__ import annotations

import torch

from megatron.config import Config
from megatron.config.arithmetic.machine import FA3, FA3_FIX, installed

HOPPER = 9  # compute capability


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
