"""Reading a checkpoint: verify, list, and fill any fragment of any layout."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xxhash

from ...parallel.layout.shard import LogicalTensor
from ..format.communicator import SOLO, Communicator, all_problems
from ..format.container import DTYPES
from ..format.durable import read_fully
from ..format.errors import CheckpointError, by_layer, describe_error
from ..format.fragment import AVERAGE, MASTER, TRAINED, WEIGHT, Fragment, FragmentSpec
from ..format.manifest import open_index, read_manifest, read_part
from ..format.meta import Meta
from ..format.names import META_NAME, wrong_name
from ..format.rankfile import FileRecord, read_table
from ..format.table import Vocabulary, spec_of
from .read_plan import Files, execute, plan

VERIFY_CHUNK = 4 << 20  # bytes, per thread
STAND_INS = {MASTER: WEIGHT, WEIGHT: MASTER}  # each can be made of the other
IMPLIED = {TRAINED: MASTER}  # whoever reads the one needs no other to go on


def open_checkpoint(
    path: str | Path, *, verify: str = "sizes", communicator: Communicator = SOLO, threads: int = 4
) -> Checkpoint:
    """Open a checkpoint, on every rank of the communicator.

    Args:
        path: its directory.
        verify: "none", "sizes" of all files, or "checksums" of every byte. The ranks share the work.

    Raises:
        CheckpointError: on every rank, with all that is wrong on any.
    """
    if verify not in ("none", "sizes", "checksums"):
        raise ValueError(f"verify is 'none', 'sizes' or 'checksums', not {verify!r}")
    checkpoint, problems = None, []
    try:
        # Together the ranks read the index whole; each reads its share of it, and later the rows that it needs.
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
        """`share`: which part of the index (number, count) is compared with its checksums now; the rest is when it is
        looked at."""
        if not path.is_dir():
            raise CheckpointError(path, "there is no such checkpoint")
        self.path = path
        self._averaged = False
        manifest = read_manifest(path)
        self.meta = Meta.from_bytes(read_part(path, META_NAME, manifest.meta), path / META_NAME)
        self.index, self.records = open_index(path, manifest, share)
        wrong = wrong_name(path, self.meta.step)
        if wrong:
            raise CheckpointError(path, f"{wrong} again")

    @property
    def step(self) -> int:
        return self.meta.step

    @property
    def title(self) -> str:
        """What messages call it."""
        return str(self.path)

    def release(self) -> None:
        """Nobody reads it any more; all ranks call it."""

    @cached_property
    def tensors(self) -> dict[str, LogicalTensor]:
        """The logical tensors, by name."""
        return {tensor.name: tensor for tensor in self.index.vocabulary.tensors}

    @cached_property
    def stored(self) -> dict[tuple[str, str], torch.dtype]:
        """(tensor name, state) -> type, of everything stored."""
        return {key: DTYPES[name] for key, name in self.index.stored().items()}

    def averaged(self) -> Checkpoint:
        """The same checkpoint with the average of the weights in their place.

        Raises:
            CheckpointError: it has none.
        """
        if not any(state == AVERAGE for _, state in self.stored):
            raise CheckpointError(self.path, "it has no average of the weights: its run had no training.weight_average")
        found = copy.copy(self)
        found._averaged = True
        return found

    def has_weights(self, name: str) -> bool:
        """Whether a tensor is a parameter; some optimizers keep states that are tensors of their own."""
        return (name, WEIGHT) in self.stored or (name, MASTER) in self.stored

    # -- trust -----------------------------------------------------------------------------------------------------

    def damage(self, *, checksums: bool = True, share: tuple[int, int] = (0, 1), threads: int = 4) -> list[str]:
        """What is wrong with the ranks' files; empty if nothing is.

        Args:
            checksums: read every byte; without, sizes alone.
            share: (rank, ranks) when several look at a part of the files each.
        """
        mine = range(share[0], len(self.records), share[1])
        with ThreadPoolExecutor(max(1, threads)) as pool:
            found = pool.map(lambda number: self.file_damage(number, checksums), mine)
            return [problem for problems in found for problem in problems]

    def file_damage(self, number: int, checksums: bool = True) -> list[str]:
        """What is wrong with one rank's file; empty if nothing is."""
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
    ) -> None:
        """Raise unless everything wanted by any rank is stored, and everything stored is wanted by some rank.

        Args:
            wanted: what this rank will read.
            states: only these stored states must be wanted (initialising from weights leaves the moments alone).

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
        keys = sorted(key for key in self.stored if states is None or key[1] in states)
        weights, *wanted_by_any = communicator.any_rank([weights, *(key in used for key in keys)])
        problems = all_problems(communicator, by_layer(problems))
        left = [key for key, found in zip(keys, wanted_by_any, strict=True) if not found]
        problems += by_layer(
            f"left over: {name} ({state}) is in the checkpoint, but not in the run" for name, state in left
        )
        weights = weights or any(state in STAND_INS for _, state in left)
        if problems and not weights:
            problems.insert(
                0,
                "the weights fit, the optimizer's states are another one's: resume with the optimizer that it was "
                "saved with, or take the weights alone (checkpoint.initialize_from)",
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
            return [f"missing: {spec.label} is in the run; the checkpoint has only {', '.join(have)} of it"]
        return []

    # -- values ----------------------------------------------------------------------------------------------------

    def read(self, spec: FragmentSpec, dtype: torch.dtype | None = None) -> Fragment:
        """One fragment, on the host.

        Args:
            dtype: type to convert to; None leaves the stored one.
        """
        source = self.source(spec, dtype)
        if source is None:
            raise CheckpointError(self.path, self._misfit(spec))
        fragment = Fragment.empty(spec, dtype or self.stored[spec.tensor.name, source])
        with Files(self.path, self.records) as files:
            execute(plan(self.index, spec, source), files, fragment.data)
        return fragment

    def load(self, specs: Iterable[FragmentSpec]) -> Iterator[Fragment]:
        """The wanted fragments one by one, in the types they are stored in; only one is in memory at a time."""
        for spec in specs:
            yield self.read(spec)

    def read_into(
        self,
        targets: Iterable[Fragment],
        *,
        cast: Collection[str] = (),
        communicator: Communicator = SOLO,
        threads: int = 4,
    ) -> list[str]:
        """Fill the data of each fragment, on whatever device it is. Beside the targets it holds a chunk per thread.

        A weight and its fp32 master stand for each other where only one is stored, and a weight of another type than
        the stored one is made of the master.

        Args:
            cast: states that may be converted to another floating-point type; else another type is an error.
            communicator: ranks that load at the same time; all call. Each begins at another place, so that thousands
                do not open the same file at once.

        Returns:
            What was converted or taken from a stand-in, one sentence per kind.

        Raises:
            CheckpointError: on every rank; something does not fit (then nothing was filled), or a file is damaged.
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
        self._raise_together(failures, communicator)
        return [f"{number} fragments: {note}" for note, number in notes.items()]

    def _fill(self, targets: list[Fragment]) -> list[str]:
        """Fill some targets; returns what went wrong instead of raising it, because other ranks must hear of it."""
        with Files(self.path, self.records) as files:
            try:
                for target in targets:
                    spec = target.spec
                    execute(plan(self.index, spec, self.source(spec, target.data.dtype)), files, target.data)
            except CheckpointError as error:
                return [str(error)]
        return []

    def _raise_together(self, problems: list[str], communicator: Communicator) -> None:
        """Raise on every rank what any rank found."""
        everything = all_problems(communicator, problems)
        if everything:
            raise CheckpointError(self.path, everything)

    def source(self, spec: FragmentSpec, dtype: torch.dtype | None = None) -> str | None:
        """The stored state to read a wanted one (in this type) from: itself, or what can stand for it, or None."""
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
    """The rows whose bytes in the file do not have their checksum."""
    buffer = bytearray(VERIFY_CHUNK)
    ends = np.append(rows["offset"][1:], record.end)
    handle = os.open(path, os.O_RDONLY)
    try:
        for row, end in zip(rows, ends, strict=True):
            digest = xxhash.xxh3_64()
            for offset in range(int(row["offset"]), int(end), len(buffer)):
                part = memoryview(buffer)[: min(len(buffer), int(end) - offset)]
                read_fully(handle, part, offset)
                digest.update(part)
            if digest.intdigest() != row["checksum"]:
                yield row
    finally:
        os.close(handle)
