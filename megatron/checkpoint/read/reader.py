"""Read a checkpoint: verify it, list it, and fill any fragment of any layout."""

import copy
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xxhash

from megatron.config import Config
from megatron.config.sequences import as_of
from megatron.config.source.resolved_file import read_resolved_text
from megatron.parallel.layout.shard import LogicalTensor

from ..format.communicator import SOLO, Communicator, all_problems
from ..format.container import DTYPES
from ..format.durable import opened, read_fully, wrong_name
from ..format.errors import CheckpointError, by_layer, describe_error
from ..format.fragment import AVERAGE, MASTER, TRAINED, WEIGHT, Fragment, FragmentSpec
from ..format.manifest import open_index, read_manifest, read_meta
from ..format.rankfile import FileRecord, read_table
from ..format.table import Vocabulary, spec_of
from .read_plan import Files, execute, plan

VERIFY_CHUNK = 1 << 20  # bytes, per thread. Hashed while in the cache of a core
STAND_INS = {MASTER: WEIGHT, WEIGHT: MASTER}  # each can be computed from the other
IMPLIED = {TRAINED: MASTER}  # reading the key makes reading the value unnecessary


def open_checkpoint(
    path: str | Path, *, verify: str = "sizes", communicator: Communicator = SOLO, threads: int = 4
) -> "Checkpoint":
    """Open a checkpoint, on every rank of the communicator.

    Args:
        path: its directory.
        verify: "none", "sizes" of all files, or "checksums" of every byte. The ranks share the work.

    Raises:
        CheckpointError: on every rank, with the problems of all.
    """
    if verify not in ("none", "sizes", "checksums"):
        raise ValueError(f"verify is 'none', 'sizes' or 'checksums', not {verify!r}")
    checkpoint, problems = None, []
    try:
        # Each rank verifies its share of the index now, and the rows that it needs later.
        checkpoint = Checkpoint(Path(path), share=(communicator.rank, communicator.size))
    except CheckpointError as error:
        part = os.path.relpath(error.subject, path)
        problems = [problem if part == "." else f"{part}: {problem}" for problem in error.problems]
    if checkpoint is not None and verify != "none":
        problems = checkpoint.damage(
            checksums=verify == "checksums", share=(communicator.rank, communicator.size), threads=threads
        )
    problems = all_problems(communicator, problems)
    if problems or checkpoint is None:
        raise CheckpointError(path, problems)
    return checkpoint


class Checkpoint:
    """An opened checkpoint. It has no layout: any range of any shard can be read.

    Attributes:
        path: its directory.
        meta: step, configuration, positions.
        index: where each fragment is.
        records: the ranks' files.
    """

    def __init__(self, path: Path, *, share: tuple[int, int] = (0, 1)) -> None:
        """`share`: the part of the index (number, count) that is verified now. The rest is verified on use."""
        if not path.is_dir():
            raise CheckpointError(path, "there is no such checkpoint")
        self.path = path
        self._averaged = False
        manifest = read_manifest(path)
        self.meta = read_meta(path, manifest.meta)
        self.index, self.records = open_index(path, manifest, share)
        wrong = wrong_name(path, self.meta.step)
        if wrong:
            raise CheckpointError(path, f"{wrong} again")

    @property
    def step(self) -> int:
        return self.meta.step

    @property
    def title(self) -> str:
        """Name in messages."""
        return str(self.path)

    def release(self) -> None:
        """Free resources at the end of reading. All ranks call."""

    @cached_property
    def tensors(self) -> dict[str, LogicalTensor]:
        return {tensor.name: tensor for tensor in self.index.vocabulary.tensors}

    @cached_property
    def stored(self) -> dict[tuple[str, str], torch.dtype]:
        """(tensor name, state) -> type, of everything stored."""
        return {key: DTYPES[name] for key, name in self.index.stored().items()}

    def averaged(self) -> "Checkpoint":
        """The same checkpoint with the average of the weights in place of the weights.

        Raises:
            CheckpointError: it has no average.
        """
        if not any(state == AVERAGE for _, state in self.stored):
            raise CheckpointError(self.path, "it has no average of the weights: its run had no training.weight_average")
        found = copy.copy(self)
        found._averaged = True
        return found

    def has_weights(self, name: str) -> bool:
        """Whether a tensor is a parameter. Some optimizers store states under tensors of their own."""
        return (name, WEIGHT) in self.stored or (name, MASTER) in self.stored

    # -- trust -----------------------------------------------------------------------------------------------------

    def damage(self, *, checksums: bool = True, share: tuple[int, int] = (0, 1), threads: int = 4) -> list[str]:
        """Problems of the ranks' files.

        Args:
            checksums: read every byte. Otherwise only sizes are compared.
            share: (rank, ranks) that share the files.
        """
        mine = range(share[0], len(self.records), share[1])
        with ThreadPoolExecutor(max(1, threads)) as pool:
            found = pool.map(lambda number: self.file_damage(number, checksums), mine)
            return [problem for problems in found for problem in problems]

    def file_damage(self, number: int, checksums: bool = True) -> list[str]:
        """Problems of one rank's file."""
        try:
            record = self.records[number]
        except CheckpointError as error:
            return [describe_error(error)]
        try:
            path = record.under(self.path)
            size = os.stat(path).st_size
            if size != record.size:
                return [f"{record.path} has {size} bytes instead of {record.size}"]
            if not checksums:
                return []
            text, rows = read_table(self.path, record)
            changed = [spec_of(row, Vocabulary.from_json(text)) for row in _changed_rows(path, record, rows)]
            return [
                f"{record.path}: the bytes of {spec.label}, shard {spec.tensor_rank} of {spec.tensor_ranks}, "
                f"elements {spec.start} to {spec.stop}, do not have their checksum"
                for spec in changed
            ]
        except FileNotFoundError:
            return [f"{record.path} is lost"]
        except (CheckpointError, OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
            return [f"{record.path}: {describe_error(error)}"]

    # -- fit -------------------------------------------------------------------------------------------------------

    def check(
        self,
        wanted: Iterable[FragmentSpec],
        *,
        communicator: Communicator = SOLO,
        states: Collection[str] | None = None,
        spare: Collection[str] = (),
    ) -> None:
        """Compare the fragments that the ranks want with the stored ones, both ways.

        Args:
            wanted: fragments that this rank will read.
            states: only these stored states must be wanted (to initialise from weights, without the moments).
            spare: stored tensors that need not be wanted.

        Raises:
            CheckpointError: on every rank, with every tensor that is missing, left over or of another shape.
        """
        problems, used, weights = [], set(), False
        for spec in wanted:
            misfit = self._misfit(spec)
            weights |= bool(misfit) and (spec.state in STAND_INS or spec.tensor.name not in self.tensors)
            problems += misfit
            covered = {spec.state, STAND_INS.get(spec.state, spec.state), IMPLIED.get(spec.state, spec.state)}
            used |= {(spec.tensor.name, state) for state in covered}
        must = [key for key in self.stored if key[0] not in spare]
        keys = sorted(key for key in must if states is None or key[1] in states)
        weights, *wanted_by_any = communicator.any_rank([weights, *(key in used for key in keys)])
        problems = all_problems(communicator, by_layer(problems))
        left = [key for key, found in zip(keys, wanted_by_any, strict=True) if not found]
        problems += by_layer(f"left over: {name} ({s}) is in the checkpoint, not in the run" for name, s in left)
        weights = weights or any(state in STAND_INS for _, state in left)
        if problems and not weights:
            problems.insert(
                0,
                "the weights fit, but the states belong to another optimizer: resume with the optimizer that it was "
                "saved with, or take only the weights (checkpoint.initialize_from)",
            )
        if problems:
            raise CheckpointError(self.path, problems)

    def _misfit(self, spec: FragmentSpec) -> list[str]:
        stored = self.tensors.get(spec.tensor.name)
        if stored is None:
            return [f"missing: {spec.tensor.name} is in the run, but not in the checkpoint"]
        if stored.shape != spec.tensor.shape:
            shapes = f"{spec.tensor.shape} in the run, {stored.shape} in the checkpoint"
            return [f"wrong shape: {spec.tensor.name} is {shapes}"]
        if self.source(spec, None) is None:
            have = sorted(state for name, state in self.stored if name == spec.tensor.name)
            return [f"missing: {spec.label} is in the run. The checkpoint has only {', '.join(have)} of it"]
        return []

    # -- values ----------------------------------------------------------------------------------------------------

    def read(self, spec: FragmentSpec, dtype: torch.dtype | None = None) -> Fragment:
        """One fragment, on the host.

        Args:
            dtype: type to convert to. None keeps the stored one.
        """
        source = self.source(spec, dtype)
        if source is None:
            raise CheckpointError(self.path, self._misfit(spec))
        fragment = Fragment.empty(spec, dtype or self.stored[spec.tensor.name, source])
        with closing(Files(self.path, self.records)) as files:
            execute(plan(self.index, spec, source), files, fragment.data)
        return fragment

    def read_into(
        self,
        targets: Iterable[Fragment],
        *,
        cast: Collection[str] = (),
        communicator: Communicator = SOLO,
        threads: int = 4,
    ) -> list[str]:
        """Fill the data of each fragment, on any device, with one or two chunks of memory per thread.

        A weight and its fp32 master replace each other where only one is stored. A weight of another type than the
        stored one is converted from the master.

        Args:
            cast: states that may be converted to another floating-point type. For others another type is an error.
            communicator: ranks that load at the same time. All call. Each begins at another fragment, so that thousands
                of ranks do not open one file at once.

        Returns:
            Conversions and substitutions, one sentence per kind.

        Raises:
            CheckpointError: on every rank. Something does not fit (then nothing was filled), or a file is damaged.
        """
        targets = [target for target in targets if target.data.numel()]
        problems: list[str] = []
        notes: Counter[str] = Counter()
        for target in targets:
            problem, note = self._conversion(target, cast)
            problems += problem
            notes.update(note)
        self._raise_together(problems, communicator)
        turn = len(targets) * communicator.rank // communicator.size
        targets = targets[turn:] + targets[:turn]
        count = max(1, min(threads, len(targets)))
        with ThreadPoolExecutor(count) as pool:
            bounds = [len(targets) * worker // count for worker in range(count + 1)]
            shares = [targets[begin:end] for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]
            failures = [problem for found in pool.map(self._fill, shares) for problem in found]
        for device in {target.data.device for target in targets if target.data.is_cuda}:
            torch.cuda.default_stream(device).synchronize()  # the threads' own, other streams may come after it
        self._raise_together(failures, communicator)
        return [f"{number} fragments: {note}" for note, number in notes.items()]

    def _fill(self, targets: list[Fragment]) -> list[str]:
        """Fill some targets. Returns problems, since other ranks must receive them."""
        with closing(Files(self.path, self.records)) as files:
            try:
                for target in targets:
                    spec = target.spec
                    execute(plan(self.index, spec, self.source(spec, target.data.dtype)), files, target.data)
            except CheckpointError as error:
                return [str(error)]
        return []

    def _raise_together(self, problems: list[str], communicator: Communicator) -> None:
        everything = all_problems(communicator, problems)
        if everything:
            raise CheckpointError(self.path, everything)

    def source(self, spec: FragmentSpec, dtype: torch.dtype | None = None) -> str | None:
        """The stored state to read a wanted one from (in this type): itself, a substitute, or None."""
        name, state = spec.tensor.name, spec.state
        if self._averaged and state == WEIGHT and (name, AVERAGE) in self.stored:
            return AVERAGE
        stand_in = STAND_INS.get(state)
        has_stand_in = (name, stand_in) in self.stored
        if (name, state) not in self.stored:
            return stand_in if has_stand_in else None
        if state == WEIGHT and has_stand_in and dtype not in (None, self.stored[name, state]):
            return MASTER
        return state

    def _conversion(self, target: Fragment, cast: Collection[str]) -> tuple[list[str], list[str]]:
        """(problems, notes) about the type and the source of one target."""
        spec, wanted = target.spec, target.data.dtype
        problems = self._misfit(spec)
        if problems:
            return problems, []
        source = self.source(spec, wanted)
        assert source is not None  # or it were a misfit
        stored = self.stored[spec.tensor.name, source]
        if stored != wanted and not (spec.state in cast and stored.is_floating_point and wanted.is_floating_point):
            return [f"wrong type: {spec.label} is {wanted} in the run, {stored} in the checkpoint"], []
        if stored != wanted or source != spec.state:
            change = "" if stored == wanted else f", converted from {stored} to {wanted}"
            return [], [f"{spec.state} read from {source}{change}"]
        return [], []


def _changed_rows(path: Path, record: FileRecord, rows: np.ndarray) -> Iterator[np.void]:
    buffer = bytearray(VERIFY_CHUNK)
    ends = np.append(rows["offset"][1:], record.end)
    with opened(path) as handle:
        for row, end in zip(rows, ends, strict=True):
            digest = xxhash.xxh3_64()
            for offset in range(int(row["offset"]), int(end), len(buffer)):
                part = memoryview(buffer)[: min(len(buffer), int(end) - offset)]
                read_fully(handle, part, offset)
                digest.update(part)
            if digest.intdigest() != row["checksum"]:
                yield row


ADAPTERS = "adapters"  # in the meta data of a checkpoint of adapters: the hash of the weights under them


def config_of(checkpoint: Checkpoint, *, whole: bool = True) -> Config:
    """The configuration that wrote a checkpoint, as of its stage of sequence length (length and rotary options).

    Raises:
        CheckpointError: with `whole`, of a checkpoint that has adapters and not the weights under them.
    """
    if whole:
        refuse_adapters(checkpoint)
    return as_of(read_resolved_text(checkpoint.meta.config, f"checkpoint {checkpoint.path}"), checkpoint.meta.step)


def refuse_adapters(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` if a checkpoint has adapters and not the weights under them."""
    if ADAPTERS in checkpoint.meta.extra:
        raise CheckpointError(
            checkpoint.path,
            "it has adapters, without the weights that they belong to: `deepy adapter merge` makes a whole checkpoint",
        )
