"""Meta data of a checkpoint: step, configuration, positions in the data and in the ledger."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from typing import Any

from .errors import CheckpointError, understanding


def versions() -> dict[str, str]:
    """Versions of the programs that make a checkpoint. Packages that are not installed are omitted."""
    found = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "transformers", "safetensors", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    from ... import __version__

    return {"megatron": __version__, **found}


IMPORTED = "hugging_face"  # key of `extra`: an imported model's further facts. Runs that start from it keep them


@dataclass(frozen=True)
class Meta:
    """A run's state except for tensors, as plain JSON values.

    There is no state of a random generator: every draw is a function of (seed, step, place).

    Attributes:
        step: optimizer steps done.
        config: the resolved configuration's text.
        layout: the layout that wrote it, for display only.
        optimizer: the optimizer's state besides tensors (name, steps per group).
        schedule: state of the learning-rate schedule, if it has any beyond the step.
        data: position in the data (samples and tokens consumed, hash of the last sample).
        ledger: position in the run's ledger.
        versions: of the programs that wrote it.
        resumable: False for a checkpoint with only weights.
    """

    step: int
    config: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)
    resumable: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def config_hash(self) -> str:
        return hashlib.sha256(self.config.encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """JSON with all digits of floats."""
        return json.dumps({**asdict(self), "config_hash": self.config_hash}, indent=1).encode()

    @classmethod
    def from_bytes(cls, text: bytes, subject: object) -> Meta:
        """Read the output of `to_bytes`.

        Raises:
            CheckpointError: it is damaged, or the configuration does not have the recorded hash.
        """
        with understanding(subject):
            values = json.loads(text)
            recorded = values.pop("config_hash")
            unknown = sorted(set(values) - {item.name for item in fields(cls)})
            meta = cls(**{name: value for name, value in values.items() if name not in unknown})
        if unknown:
            raise CheckpointError(subject, f"written by a newer version: unknown entries {', '.join(unknown)}")
        if meta.config_hash != recorded:
            raise CheckpointError(subject, "the configuration text does not have the hash written with it")
        return meta
