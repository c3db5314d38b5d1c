"""Logical tensors as streams of values, a chunk at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from ..format.durable import CHUNK
from ..format.errors import CheckpointError
from ..format.fragment import FragmentSpec
from .read_plan import Files, execute, plan
from .reader import Checkpoint


class TensorStream:
    """Reads ranges of any size through one buffer.

    Args:
        chunk: bytes of the buffer.
    """

    def __init__(self, checkpoint: Checkpoint, chunk: int = CHUNK) -> None:
        self._checkpoint = checkpoint
        self._files = Files(checkpoint.path, checkpoint.records)
        self._buffer = torch.empty(chunk, dtype=torch.uint8)

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def values(self, spec: FragmentSpec) -> Iterator[torch.Tensor]:
        """The range as consecutive 1-D tensors in the stored type. Each is valid until the next is taken.

        Raises:
            CheckpointError: neither the state nor a substitute is stored.
        """
        source = self._checkpoint.source(spec)
        if source is None:
            raise CheckpointError(self._checkpoint.path, f"{spec.label} is not in the checkpoint")
        dtype = self._checkpoint.stored[spec.tensor.name, source]
        buffer = self._buffer[: self._buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        for part in spec.parts(buffer.numel()):
            execute(plan(self._checkpoint.index, part, source), self._files, buffer[: part.length])
            yield buffer[: part.length]

    def sha256(self, name: str, state: str) -> str:
        """Hash of a logical tensor's bytes (row-major, little-endian), independent of the layout that wrote it."""
        digest = hashlib.sha256()
        for values in self.values(FragmentSpec.whole(self._checkpoint.tensors[name], state)):
            digest.update(values.view(torch.uint8).numpy().data)
        return digest.hexdigest()
