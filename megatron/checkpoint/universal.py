"""DeepSpeed's universal checkpoints: a folder per parameter, `zero/<name>/{fp32,exp_avg,exp_avg_sq,step}.pt`.

Each file of values is a dictionary. `param` is the whole parameter. `cat_dim` and `param_n_sub_params` (for equal parts
that are cut separately) say how tensor parallel ranks cut it (deepspeed's universal_checkpoint.py). `step.pt` is a
number. Other optimizers' states have files of their own names. DeepSpeed's engine also reads `zero/optimizer_state.pt`
(states of the whole optimizer) and a file of model states (numbers of steps). The latter has one name for ZeRO 1 and 2
and another for ZeRO 3.

DeepSpeed's own converter makes this form of native checkpoints (`made_universal`). Without ZeRO a native checkpoint is
one file of model states with the optimizer's states in the order of its parameters. It is read here."""

import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.file_access import UnsafeName, check_name
from megatron.config.source.layers import Origin
from megatron.config.source.yaml_source import parse
from megatron.parallel.layout.shard import LogicalTensor

from .format.container import load_tensors
from .format.durable import new_folder
from .format.errors import CheckpointError, understanding
from .format.fragment import MASTER, WEIGHT, FragmentSpec
from .format.manifest import Meta
from .read.reader import Checkpoint
from .save.writer import write_tensors

FP32, STEP, PARAM = "fp32", "step", "param"
STATE_OF = {FP32: MASTER}  # their file -> our state. Others have the same name
FILE_OF = {MASTER: FP32}
OPTIMIZER = "optimizer_state.pt"
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")  # ZeRO 1 and 2, then ZeRO 3
LATEST = "latest_universal"
DS_VERSION = "0.19.8"  # format of these files


def read_names(path: Path) -> dict[str, str]:
    """Read a YAML file of `our name: their name`.

    Raises:
        ValueError: it is no such mapping.
    """
    values, _, problems = parse(path.read_text(encoding="utf-8"), lambda line: Origin("file", str(path), line))
    if problems or not isinstance(values, dict):
        raise ValueError(f"{path}: it is no YAML mapping of our names to theirs")
    wrong = [name for name, value in values.items() if not isinstance(value, str)]
    if wrong:
        raise ValueError(f"{path}: {wrong[0]} has no name, but {values[wrong[0]]!r}")
    return values


@contextmanager
def made_universal(source: Path, out: Path, trust: bool) -> Iterator[Path]:
    """The universal form of a DeepSpeed checkpoint: itself, or the converted native one.

    Args:
        source: a folder with `zero/`, or a native checkpoint.
        out: the future checkpoint. The universal form is a temporary folder next to it.
        trust: allow the converter to unpickle native files, which can run code.

    Raises:
        CheckpointError: a native checkpoint without trust, or one that the converter rejects.
    """
    if (source / "zero").is_dir() or not any(source.glob("*_model_states.pt")):
        yield source
        return
    if not any(source.glob("*_optim_states.pt")):
        with tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=".universal-") as folder:
            _split(source, Path(folder))
            yield Path(folder)
        return
    if not trust:
        rule = "native files are pickles, which can run code when they are read: give --trust if you trust their source"
        raise CheckpointError(source, rule)
    with tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=".universal-") as folder:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(source), "--output_folder", folder]
        command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        command.append("--inject_missing_state")  # DeepSpeed's sharding of tensors, which plain programs do not save
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CheckpointError(source, f"DeepSpeed's converter failed: {done.stderr.strip().splitlines()[-1:]}")
        yield Path(folder)


def _split(source: Path, folder: Path) -> None:
    """Write a folder per parameter of a checkpoint without ZeRO.

    Its optimizer's states are numbered. They are taken where one group has all parameters, in the module's order.

    Raises:
        CheckpointError: there are several files (tensor or pipeline parallel ranks), or it is damaged.
    """
    files = sorted(source.glob("*_model_states.pt"))
    if len(files) > 1:
        raise CheckpointError(source, f"without ZeRO it must have one file of model states, and it has {len(files)}")
    with understanding(files[0]):
        found = load_tensors(files[0])
        other = {*(found.get("buffer_names") or ()), *(found.get("shared_params") or ())}
        first: dict[tuple[int, torch.Size], str] = {}  # a tied parameter is there under each of its names
        for name, values in found["module"].items():
            if name not in other:
                first.setdefault((values.data_ptr() if values.numel() else id(values), values.shape), name)
        weights = {name: found["module"][name] for name in first.values()}
        optimizer = found.get("optimizer") or {}
        groups, states = optimizer.get("param_groups") or [], optimizer.get("state") or {}
        ordered = [states.get(number, {}) for number in groups[0]["params"]] if len(groups) == 1 else []
        shapes = [[each.shape for each in own.values() if isinstance(each, Tensor) and each.ndim] for own in ordered]
        known = len(ordered) == len(weights) and all(
            shape == values.shape for values, own in zip(weights.values(), shapes) for shape in own
        )
        _check_names([*weights, *(str(state) for own in ordered for state in own)], files[0])
        for number, (name, values) in enumerate(weights.items()):
            place = folder / "zero" / name
            place.mkdir(parents=True)
            own = ordered[number] if known else {}
            for state, content in ({**own, FP32: values.float()}).items():
                _save({PARAM: content} if state != STEP else torch.as_tensor(content), place / f"{state}.pt")
        _save({name: found.get(name) for name in ("global_steps", "skipped_steps")}, folder / files[0].name)


def export(checkpoint: Checkpoint, out: Path, names: Mapping[str, str] | None = None) -> int:
    """Write a checkpoint's masters and optimizer states, one tensor at a time.

    Args:
        out: a folder that does not exist. It appears complete or not at all. Its name is DeepSpeed's tag
            (`global_step10_universal`).
        names: our name -> theirs, for all tensors. None keeps our names.

    Returns:
        The number of parameters.

    Raises:
        CheckpointError: `out` exists, a tensor has no name or fp32 value, or two have one name.
    """
    theirs = _named(checkpoint, names)
    if out.exists():
        raise CheckpointError(out, "it exists already")
    states: dict[str, set[str]] = {name: set() for name in checkpoint.tensors}
    for name, state in checkpoint.stored:
        states[name].add(state)
    _check_names([*theirs.values(), *(FILE_OF.get(state, state) for _, state in checkpoint.stored)], checkpoint.path)
    bare = [
        f"{name} has no fp32 master"
        for name, found in states.items()
        if MASTER not in found and checkpoint.stored.get((name, WEIGHT)) != torch.float32
    ]
    if bare:
        raise CheckpointError(checkpoint.path, bare)
    with new_folder(out) as draft:
        for name, found in states.items():
            folder = draft / "zero" / theirs[name]
            folder.mkdir(parents=True)
            tensor = checkpoint.tensors[name]
            for state in sorted(found - {WEIGHT} | {MASTER}):
                values = checkpoint.read(FragmentSpec.whole(tensor, state), torch.float32).data.view(tensor.shape)
                _save({PARAM: values, **_cut(tensor)}, folder / f"{FILE_OF.get(state, state)}.pt")
            if "step" in checkpoint.meta.optimizer:
                _save(torch.tensor(float(checkpoint.meta.optimizer["step"])), folder / f"{STEP}.pt")
        _write_engine_state(draft, checkpoint.meta, len(states))
    return len(states)


def mark_latest(out: Path) -> bool:
    """Write DeepSpeed's file of the newest tag. Returns False if it names another checkpoint."""
    path = out.parent / LATEST
    if path.exists():
        return path.read_text(encoding="utf-8").strip() == out.name
    path.write_text(out.name, encoding="utf-8")
    return True


def _write_engine_state(folder: Path, meta: Meta, parameters: int) -> None:
    """Write the files that DeepSpeed's engine (0.19.8) reads in addition to the parameters.

    Its loader pairs these groups of parameters with its optimizer's groups, and ignores parameters of unpaired groups.
    So there is one group per parameter. The groups are empty: learning rate, betas and weight decay come from its
    configuration."""
    done = torch.tensor(float(meta.optimizer.get("step", meta.step)))
    optimizer = {
        "ds_version": DS_VERSION,
        "param_groups": [{} for _ in range(parameters)],
        "optimizer_state_dict": {"state": {0: {"step": done}}, "param_groups": [{}]},  # where ZeRO 3 looks
    }
    _save(optimizer, folder / "zero" / OPTIMIZER)
    schedule = {"last_batch_iteration": meta.step - 1, "last_epoch": meta.step}  # DeepSpeed's schedules, and torch's
    engine = {
        "module": {},
        "lr_scheduler": schedule,
        "global_steps": meta.step,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": DS_VERSION,
    }
    for name in MODEL_STATES:
        _save(engine, folder / name)


def _save(value: Any, path: Path) -> None:
    """Call torch.save, but raise the OSError of a full disk. Its own error is about a file position."""
    with open(path, "wb", buffering=0) as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise OSError(f"{path} could not be written: {str(error).splitlines()[0]}") from error


def _check_names(names: Iterable[str], path: Path) -> None:
    problems = []
    for name in dict.fromkeys(names):
        try:
            check_name(name)
        except UnsafeName as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(path, problems)


def _named(checkpoint: Checkpoint, names: Mapping[str, str] | None) -> dict[str, str]:
    if names is None:
        return {name: name for name in checkpoint.tensors}
    problems = [f"{name} has no name in the mapping" for name in checkpoint.tensors if name not in names]
    problems += [f"the mapping has {n}, which is not in the checkpoint" for n in names if n not in checkpoint.tensors]
    problems += _doubled(names)
    if problems:
        raise CheckpointError(checkpoint.path, problems)
    return dict(names)


def _doubled(names: Mapping[str, str]) -> list[str]:
    seen: dict[str, str] = {}
    return [
        f"{ours} and {seen[theirs]} are both called {theirs}"
        for ours, theirs in names.items()
        if seen.setdefault(theirs, ours) != ours
    ]


def _cut(tensor: LogicalTensor) -> dict[str, int]:
    """DeepSpeed's description of how our layouts cut the tensor, empty where it has none."""
    if tensor.shard is None or tensor.shard.across == tensor.shard.dim:
        return {}
    parts = tensor.shard.parts or (tensor.shape[tensor.shard.dim],)
    if len(set(parts)) > 1:
        return {"cat_dim": tensor.shard.dim}
    return {"cat_dim": tensor.shard.dim, **({"param_n_sub_params": len(parts)} if len(parts) > 1 else {})}


class Universal:
    """An opened universal checkpoint.

    Attributes:
        names: DeepSpeed's names of the parameters.
        extra: names of buffers and of second names of parameters.

    Raises:
        CheckpointError: it has no parameters.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "zero"
        self.extra = _no_parameters(folder)
        self.names = sorted(path.parent.relative_to(self.folder).as_posix() for path in self.folder.rglob(f"{FP32}.pt"))
        if not self.names:
            raise CheckpointError(
                folder,
                f"it has no zero/<parameter>/{FP32}.pt. Convert a native checkpoint by: "
                "python -m deepspeed.checkpoint.ds_to_universal --input_folder "
                "CHECKPOINT/TAG --output_folder CHECKPOINT/TAG_universal",
            )

    def states(self, name: str) -> list[str]:
        """Our names of a parameter's states."""
        files = sorted(path.stem for path in (self.folder / name).glob("*.pt") if path.stem != STEP)
        return [STATE_OF.get(file, file) for file in files]

    def read(self, name: str, state: str) -> Tensor:
        """The values of one state, memory-mapped.

        Raises:
            CheckpointError: the file is damaged, or has no values.
        """
        path = self.folder / name / f"{FILE_OF.get(state, state)}.pt"
        values = load_tensors(path)
        values = values.get(PARAM) if isinstance(values, dict) else values
        if not isinstance(values, Tensor):
            raise CheckpointError(path, f"it has no tensor {PARAM!r}")
        return values

    def step(self) -> int | None:
        """The optimizer's step. None if none is stored.

        Raises:
            CheckpointError: parameters have different steps.
        """
        found = {float(load_tensors(path)): path for path in sorted(self.folder.rglob(f"{STEP}.pt"))}
        if len(found) > 1:
            raise CheckpointError(self.folder, [f"{path} says {step:g}" for step, path in found.items()])
        return int(next(iter(found))) if found else None

    def global_steps(self) -> int | None:
        """Number of updates, from the counters of DeepSpeed's engine."""
        found = _model_states(self.folder.parent)
        done, skipped = found.get("global_steps"), found.get("skipped_steps") or 0
        return done - skipped if isinstance(done, int) and isinstance(skipped, int) else None


def _model_states(folder: Path) -> dict[str, Any]:
    for path in sorted(folder.glob("*_model_states.pt")):
        try:
            found = load_tensors(path)
        except CheckpointError:  # it has a program's own classes
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _no_parameters(folder: Path) -> set[str]:
    found = _model_states(folder)
    names = [found.get(key) for key in ("buffer_names", "shared_params")]
    return {str(name) for each in names if isinstance(each, (list, dict)) for name in each}


def restore(
    source: Universal,
    out: Path,
    tensors: Mapping[str, LogicalTensor],
    config: str,
    *,
    names: Mapping[str, str] | None,
    step: int | None = None,
) -> Meta:
    """Convert a universal checkpoint to a native one of ours, one tensor at a time.

    Args:
        out: directory of the checkpoint, which must not exist.
        names: our name -> theirs. None: the same names.
        step: completed updates of the run. Default: the optimizer's.

    Raises:
        CheckpointError: parameters are missing, unknown or of another shape, or have different states.
    """
    if out.exists():
        raise CheckpointError(out, "it exists already")
    theirs = {name: name for name in tensors} if names is None else dict(names)
    _check_tensors(source, tensors, theirs)
    updates = source.step()
    done = step if step is not None else source.global_steps() if updates is None else updates
    whole = all(len(source.states(theirs[name])) > 1 for name in tensors)
    if done is None and whole:
        raise CheckpointError(source.folder, "it has no number of updates: give --step")
    meta = Meta(
        step=done or 0,
        config=config,
        resumable=whole,
        extra={"imported": "DeepSpeed universal"},
        optimizer={} if done is None else {"step": float(done if updates is None else updates)},
    )
    items = [
        (FragmentSpec.whole(tensor, state), torch.float32)
        for name, tensor in tensors.items()
        for state in source.states(theirs[name])
    ]
    write_tensors(out, items, _values(source, theirs, items), meta)
    return meta


def _check_tensors(source: Universal, tensors: Mapping[str, LogicalTensor], theirs: Mapping[str, str]) -> None:
    problems = [
        f"missing: {name} ({theirs.get(name, 'no name in the mapping')})"
        for name in tensors
        if theirs.get(name) not in source.names
    ]
    known = {theirs[name] for name in tensors if name in theirs}
    problems += [f"left over: {name}" for name in source.names if name not in known and name not in source.extra]
    problems += _doubled({name: theirs[name] for name in tensors if name in theirs})
    if not problems:
        problems = [
            f"{theirs[name]} ({state}) is {tuple(found)}, the model has {tensor.shape}"
            for name, tensor in tensors.items()
            for state in source.states(theirs[name])
            if tuple(found := source.read(theirs[name], state).shape) not in (tensor.shape, (math.prod(tensor.shape),))
        ]  # the converter leaves parameters of ZeRO 3 flat
    if problems:
        raise CheckpointError(source.folder, problems)


def _values(
    source: Universal, theirs: Mapping[str, str], items: Sequence[tuple[FragmentSpec, torch.dtype]]
) -> Callable[[int], Iterator[Tensor]]:
    def values(number: int) -> Iterator[Tensor]:
        spec = items[number][0]
        yield source.read(theirs[spec.tensor.name], spec.state).float().contiguous().flatten()

    return values
