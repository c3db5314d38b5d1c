"""Write a checkpoint: complete or absent.

Every rank writes one file into `step_00001000.tmp-<token>`, calls fsync, and reports the result. Rank 0 then merges the
tables of the files into the index, writes the meta data and, last, the manifest, and renames the directory. No tensor
travels between ranks. A killed run leaves a directory whose name is not a checkpoint's. An error on any rank is raised
on all, and earlier checkpoints stay as they were."""

import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ..format.communicator import SOLO, Communicator
from ..format.durable import MANIFEST, META, leftover_name, move, step_name, sync_directory, write_file, wrong_name
from ..format.errors import CheckpointError, StoreRefuses, describe_error, disk_refuses
from ..format.fragment import MASTER, Fragment, FragmentSpec
from ..format.manifest import Meta, manifest_of, write_merged
from ..format.rankfile import FileRecord, host_values, tables_of, write_rank_file


def save(
    directory: str | Path, step: int, fragments: Iterable[Fragment], meta: Meta, communicator: Communicator = SOLO
) -> Path:
    """Save one step. Every rank calls with the fragments it owns.

    Args:
        directory: folder of checkpoints, visible to all ranks.
        step: optimizer steps done.
        fragments: together the ranks must own each element of each state once.
        meta: the rest of the run's state. Rank 0's is used.

    Returns:
        The checkpoint's directory. It replaces a checkpoint of the same step.

    Raises:
        StoreRefuses: on every rank, if all errors are a disk's that is full or refuses.
        CheckpointError: on every rank, if any rank could not write, or elements are missing or written twice.
    """
    if meta.step != step:
        raise ValueError(f"the meta data of step {meta.step} cannot be saved as step {step}")
    target = Path(directory) / step_name(step)
    draft = Draft.begin(target, communicator)

    def write() -> list[FileRecord | None]:
        owned = list(fragments)
        items = [(fragment.spec, fragment.data.dtype) for fragment in owned]
        return [write_rank_file(draft.root, communicator.rank, items, host_values([each.data for each in owned]))]

    draft.write(write, meta, communicator)
    return target


def write_tensors(
    target: Path,
    items: Sequence[tuple[FragmentSpec, torch.dtype]],
    values: Callable[[int], Iterable[torch.Tensor]],
    meta: Meta,
) -> Path:
    """Write a whole checkpoint from one process, tensor by tensor.

    Args:
        target: the checkpoint's directory.
        items: fragments with their types.
        values: returns the elements of the item with that number, as consecutive 1-D host tensors. Called once per
            item, in their order (wider types first, if types differ).

    Raises:
        CheckpointError: it could not be written, or the items do not cover each tensor exactly once.
    """
    draft = Draft.begin(target)
    draft.write(lambda: [write_rank_file(draft.root, 0, items, values)], meta)
    return target


class Draft:
    """A checkpoint that is being written.

    Attributes:
        target: its final path.
        root: its path until then.
    """

    def __init__(self, target: Path, token: str) -> None:
        self.target = target
        self.token = token
        self.root = leftover_name(target, "tmp", token)

    @classmethod
    def begin(cls, target: Path, communicator: Communicator = SOLO) -> "Draft":
        """Make the directory on rank 0, and share its name."""
        answer = None
        if communicator.rank == 0:
            draft = cls(target, uuid.uuid4().hex[:12])
            try:
                draft.root.mkdir(parents=True)
                answer = [draft.token, None, False]
            except OSError as error:
                answer = [None, str(error), disk_refuses(error)]
        token, failure, full = communicator.broadcast(answer)
        if failure:
            raise (StoreRefuses if full else CheckpointError)(target, f"cannot be created: {failure}")
        return cls(target, token)

    def write(self, work: Callable[[], list[FileRecord | None]], meta: Meta, communicator: Communicator = SOLO) -> None:
        """Have this rank write its files, and `finish`, which raises errors of `work`: the other ranks wait for it."""
        records, failure = list[FileRecord](), None
        try:
            records = [record for record in work() if record is not None]
        except Exception as error:
            failure = error
        self.finish(records, failure, meta, communicator)

    def finish(
        self, records: list[FileRecord], failure: Exception | None, meta: Meta, communicator: Communicator = SOLO
    ) -> None:
        """Commit if every rank succeeded. Otherwise delete the draft and raise on every rank.

        Args:
            records: the files that this rank wrote.
            failure: why it could not.
        """
        own = [[asdict(record) for record in records], failure and describe_error(failure), disk_refuses(failure)]
        reports = communicator.collect(own)
        problems, full = [], False
        if reports is not None:
            problems = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(reports) if text]
            full = bool(problems) and all(room for _, text, room in reports if text)
            if not problems:
                problems, full = self._try_commit([FileRecord(**item) for each in reports for item in each[0]], meta)
            if problems:
                shutil.rmtree(self.root, ignore_errors=True)
        problems, full = communicator.broadcast([problems, full])
        if problems:
            raise (StoreRefuses if full else CheckpointError)(
                self.target, ["it was not saved. Earlier checkpoints are unchanged", *problems]
            ) from failure

    def _try_commit(self, records: list[FileRecord], meta: Meta) -> tuple[list[str], bool]:
        try:
            self.commit(records, meta)
        except CheckpointError as error:
            if error.subject in (str(self.root), str(self.target)):
                return error.problems, False
            file = error.subject.removeprefix(f"{self.root}{os.sep}")  # the draft is gone when this is read
            return [f"{file}: {each}" for each in error.problems], False
        except Exception as error:  # the other ranks wait for the answer, and all raise it
            return [describe_error(error)], disk_refuses(error)
        return [], False

    def commit(self, records: list[FileRecord], meta: Meta) -> None:
        """Write index, meta data and manifest, and rename the directory.

        Raises:
            CheckpointError: the fragments do not cover each tensor exactly once.
            OSError, ValueError: errors of the disk.
        """
        if wrong := wrong_name(self.target, meta.step):
            raise CheckpointError(self.target, wrong)
        index = write_merged(self.root, tables_of(self.root, records), records, whole=True)
        content = meta.to_bytes()
        write_file(self.root / META, content)
        for folder in sorted({(self.root / record.path).parent for record in records}):
            sync_directory(folder)
        if records:
            sync_directory(self.root / "data")
        write_file(self.root / MANIFEST, manifest_of(index, content))
        sync_directory(self.root)
        self._rename()

    def _rename(self) -> None:
        """Take the final name. An old checkpoint of the step steps aside. `Store.clean` repairs a kill in between."""
        aside = leftover_name(self.target, "old", self.token)
        if self.target.exists():
            move(self.target, aside)
        try:
            move(self.root, self.target)
        except OSError:
            if aside.exists() and not self.target.exists():
                move(aside, self.target)
            raise
        if aside.exists():
            shutil.rmtree(aside)


SHOWN = 3


def non_finite(fragments: Iterable[Fragment], compute: torch.dtype = torch.float32) -> list[str]:
    """Values of this rank's fragments that no run can continue from. One sentence per tensor, the first few.

    One pass over the memory, and one synchronization with the device.

    Args:
        compute: type of the forward pass. A master beyond its range is infinite there.
    """
    looked = [each for each in fragments if each.data.is_floating_point() and each.data.numel()]
    if not looked:
        return []
    # An infinity or a NaN anywhere shows in the extremes, and no sum can overflow.
    extremes = [torch.stack(torch.aminmax(each.data.detach())).abs().amax() for each in looked]
    largest = torch.stack([value.double() for value in extremes]).tolist()
    range_of = torch.finfo(compute).max
    found = []
    for fragment, value in zip(looked, largest, strict=True):
        name = f"{fragment.tensor.name} ({fragment.state})"
        if not math.isfinite(value):
            found.append(f"{name} has values that are infinite or no numbers")
        elif fragment.state == MASTER and not fragment.tensor.keep_fp32 and value > range_of:
            found.append(f"{name} has {value:.3g}, beyond the largest number of {str(compute).removeprefix('torch.')}")
    rest = len(found) - SHOWN
    return found[:SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
