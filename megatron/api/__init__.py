"""The Python API, for notebooks and scripts of one process: `import megatron.api as deepy` ::

    resolved = deepy.resolve("test/tiny_llama", "run.dir=runs/notebook")  as the command line resolves it
    run = deepy.train(resolved)                                           train here, in this process
    run.metrics()                                                         what metrics.jsonl has
    for batch in deepy.batches(run, 3, 5): ...                           exactly what steps 3 and 4 read
    deepy.tensors(run)["layers.0.attention.query.weight"]                 any tensor of any checkpoint, by logical name
    found = deepy.open_model(run).forward(batch, keep=["layers.*"])       loss, activations and gradients

Importing this module loads neither torch nor DeepSpeed, and changes nothing in the process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron.config import Config, Resolved, load, read_resolved, split_arguments

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint import Checkpoint
    from megatron.data.batch import StepBatch
    from megatron.training.trainer import Outcome

    from .analysis import OpenModel

__all__ = ["Run", "Tensors", "batches", "open_model", "resolve", "tensors", "train"]


def resolve(*words: str | os.PathLike | Mapping[str, Any], ranks: int = 1, check_inputs: bool = False) -> Resolved:
    """The configuration that a command line of these words would have.

    Args:
        words: YAML files or names of ready configurations (`"pythia/70m"`), overrides (`"optimizer.lr=1e-3"`), and
            mappings of dotted keys (`{"training.steps": 20}`).
        ranks: processes of the whole run.
        check_inputs: also check that data, tokenizer and checkpoint files are there.

    Returns:
        `.config` has the values, `.origins` where each came from, `.overridden` what lost to a later word.

    Raises:
        ConfigError: with all problems at once.
    """
    import yaml

    plain: list[str] = []
    for word in words:
        if isinstance(word, Mapping):
            plain += [f"{k}={yaml.safe_dump(value, default_flow_style=True, width=2**20)}" for k, value in word.items()]
        else:
            plain.append(os.fspath(word))
    files, overrides = split_arguments([word.removesuffix("\n").removesuffix("\n...") for word in plain])
    return load(files, overrides, ranks=ranks, check_inputs=check_inputs)


@dataclass(frozen=True)
class Run:
    """Files and results of a run in its directory.

    Attributes:
        directory: `run.dir`.
        outcome: how it ended, if it was trained here.
    """

    directory: Path
    outcome: Outcome | None = None

    @property
    def config(self) -> Config:
        """The run's resolved configuration."""
        return read_resolved(self.directory / "config.yml")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, of training steps and of validations, in their order."""
        from megatron.report.jsonl import read_lines, sound_metrics

        return list(read_lines(self.directory / "metrics.jsonl", sound_metrics))

    def checkpoints(self) -> list[Path]:
        """The run's complete checkpoints, the oldest first."""
        from megatron.checkpoint.save.store import Store

        return Store(self.config.checkpoint.dir).paths()


def train(resolved: Resolved, *, quiet: bool = True) -> Run:
    """Train in this process, as `deepy train` with one rank does: the same losses, files and checkpoints.

    A run that has checkpoints in its directory (`run.dir`) resumes from the newest one. An interrupt saves first.

    Args:
        resolved: from `resolve`, for one rank.
        quiet: print nothing. The run's files have the same text.

    Raises:
        ValueError: the configuration is for several ranks.
        RuntimeError: torch.distributed is in use in this process.
        ConfigError, CheckpointError, DataError: as on the command line.
    """
    if resolved.ranks not in (None, 1):
        raise ValueError(f"this configuration is for {resolved.ranks} ranks: give ranks=1, or use `deepy train`")
    import torch.distributed

    from megatron.config import config_hash
    from megatron.config.source.resolved_file import to_yaml
    from megatron.training.run import run_training
    from megatron.training.world import joined
    from megatron.worker.place import WorkerEnvironment

    if torch.distributed.is_initialized():
        raise RuntimeError("torch.distributed is in use here: train in a process of its own, with `deepy train`")
    config = resolved.config
    place = WorkerEnvironment(config_sha256=config_hash(config), config_text=to_yaml(resolved))
    with _process_as_it_was(), ExitStack() as stack:
        if quiet:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        with joined(config, place) as world:
            return Run(Path(config.run.dir), run_training(config, place, world))


def batches(
    source: Resolved | Config | Run | str | os.PathLike,
    start: int = 0,
    stop: int | None = None,
    *,
    split: str = "train",
) -> Iterator[StepBatch]:
    """The global batches of steps `start` to `stop` (exclusive), each exactly what the run reads at that step.

    Args:
        source: a configuration, or a run or its directory.
        stop: default: the end of the run, or of the set.
        split: "train", "validation" or "test".
    """
    from megatron.data.loader import build_loader
    from megatron.data.provenance import config_file
    from megatron.data.skipped_batches import LeftOut
    from megatron.report.ledger import left_out

    loader = build_loader(_config(source), data_rank=0, data_ranks=1, split=split)
    if split == "train" and not isinstance(source, (Resolved, Config)):
        found = left_out(config_file(_path(source)).with_name("ledger.jsonl"))
        if found is not None:
            loader.leave_out(LeftOut.of(found))
    try:
        for step in range(start, loader.steps if stop is None else stop):
            yield loader.read(step)
    finally:
        loader.close()


class Tensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a checkpoint of any layout, whole, by logical name. Each is read when it is asked for.

    Attributes:
        checkpoint: the opened checkpoint, with its step and configuration.
        state: which value of each parameter: "weight", "master" (fp32), or an optimizer's, such as "exp_avg".
    """

    def __init__(self, checkpoint: Checkpoint, state: str = "weight") -> None:
        self.checkpoint, self.state = checkpoint, state

    def __getitem__(self, name: str) -> torch.Tensor:
        from megatron.checkpoint import FragmentSpec

        tensor = self.checkpoint.tensors[name]
        spec = FragmentSpec(tensor, self.state, 0, 1, 0, math.prod(tensor.shape))
        return self.checkpoint.read(spec).data.view(tensor.shape)

    def __iter__(self) -> Iterator[str]:
        states = {self.state, {"weight": "master", "master": "weight"}.get(self.state, self.state)}
        return (n for n in self.checkpoint.tensors if any((n, s) in self.checkpoint.stored for s in states))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def matching(self, pattern: str) -> dict[str, torch.Tensor]:
        """All tensors whose names fit a shell pattern, such as `layers.*.mlp.*`."""
        return {name: self[name] for name in self if fnmatch(name, pattern)}


def tensors(path: Run | str | os.PathLike, *, state: str = "weight") -> Tensors:
    """Open the tensors of a checkpoint, or of a run's newest one.

    Raises:
        CheckpointError: there is none, or its files do not have their sizes.
    """
    from megatron.checkpoint import open_checkpoint
    from megatron.checkpoint.save.store import find_checkpoint

    return Tensors(open_checkpoint(find_checkpoint(_path(path)), verify="sizes"), state)


def open_model(
    source: Resolved | Config | Run | str | os.PathLike, *, device: str = "cpu", dtype: str | None = None
) -> OpenModel:
    """A model to examine: of a checkpoint, of a run's newest one, or with the initial values of a configuration.

    Args:
        dtype: "fp32" (default), "bf16", "fp16" or "fp64".
    """
    from .analysis import OpenModel

    if isinstance(source, (Resolved, Config)):
        return OpenModel.initial(_config(source), device, dtype or "fp32")
    return OpenModel.of_checkpoint(_path(source), device, dtype or "fp32")


def _config(source: Resolved | Config | Run | str | os.PathLike) -> Config:
    if isinstance(source, (Resolved, Run)):
        return source.config
    if isinstance(source, Config):
        return source
    from megatron.data.provenance import run_config

    return run_config(source)


def _path(source: Run | str | os.PathLike) -> Path:
    return source.directory if isinstance(source, Run) else Path(source)


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Put back what a run sets for its process: environment variables and torch's switches."""
    import torch

    deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    with mock.patch.dict(os.environ):
        try:
            yield
        finally:
            if torch.are_deterministic_algorithms_enabled() != deterministic:  # it imports torch's compiler: seconds
                torch.use_deterministic_algorithms(deterministic)
            torch.set_float32_matmul_precision(precision)
