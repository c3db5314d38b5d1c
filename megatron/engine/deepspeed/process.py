"""DeepSpeed in a process: imported without compiling or printing, on the existing process group."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist


def prepare_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed without compiling or printing. Call once per process, before the process group exists.

    On CPUs, its init_distributed would build an extension that only inference uses. A rank killed meanwhile leaves a
    lock that hangs every later run. Its ZeRO imports its Muon, unused here, whose decorators would import torch's
    compiler: seconds of every rank's start.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 has deprecated, once per step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed.ops
    from deepspeed.runtime import compiler
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with mock.patch.object(compiler, "compile", lambda: compiler.dummy_decorator):
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401


@contextlib.contextmanager
def deepspeed_quietly() -> Iterator[None]:
    """DeepSpeed on the existing process group, without its output while it builds."""
    import deepspeed

    with contextlib.redirect_stdout(io.StringIO()):
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
        yield
