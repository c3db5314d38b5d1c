"""Copies of a run's state on its own hosts: written by real ranks over gloo, lost in every way, and read on any layout.

Hosts are pretended: two ranks each, with a name and a folder of their own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint import CheckpointError, Fragment, GroupCommunicator, open_checkpoint
from megatron.checkpoint.levels import Levels, hosts, level
from megatron.checkpoint.levels import hosts as courier
from megatron.checkpoint.levels import levels as all_levels
from megatron.checkpoint.levels.hosts import own_folder, private
from megatron.config.sections.output import LevelSection
from megatron.launch.report.console import hint_for
from megatron.parallel.layout.layout import Layout
from tests.checkpoint.model import Model, fragments, meta
from tests.workers import run

RANKS = 4
ZERO_1 = Layout(data=4, zero_stage=1)
OTHERS = [Layout(data=4, zero_stage=0), Layout(tensor=2, pipeline=2), Layout(data=4, zero_stage=3)]
NEXT = LevelSection(place="memory", path="{folder}/{host}", every=1, neighbours=1, keep=2)
ALONE = LevelSection(place="disk", path="{folder}/{host}", every=1, keep=2)


def as_host(rank: int, name: str | None = None) -> None:
    hosts.host_name = lambda: name or f"host{rank // 2}"


def levels_at(folder: str, *sections: LevelSection, insist: bool = True) -> Levels:
    found = [each.model_copy(update={"path": str(each.path).replace("{folder}", folder)}) for each in sections]
    return Levels(found, f"{folder}/checkpoints", GroupCommunicator(), insist=insist)


def host_folder(folder: str, host: int) -> Path:
    (found,) = Path(folder, f"host{host}").iterdir()
    return found


def read(levels: Levels, model: Model, layout: Layout, rank: int, least: int = 0) -> tuple[int | None, list[str]]:
    """The step that is found, after everything that a rank of a layout needs was compared bit by bit. The skipped
    copies."""
    found, skipped = levels.newest(least)
    reasons = [why for _, why in skipped]
    if found is None:
        return None, reasons
    expected = fragments(model, layout, rank, replicas=True)
    filled = [Fragment.empty(each.spec, each.data.dtype) for each in expected]
    for each in filled:
        each.data.view(torch.uint8).fill_(0xAB)
    found.read_into(filled, communicator=GroupCommunicator())
    for want, have in zip(expected, filled, strict=True):
        assert torch.equal(want.data.view(torch.uint8), have.data.view(torch.uint8)), want.spec.label
    assert found.meta.data == {"samples": found.step * 8} and found.meta.ledger == {"bytes": 7}
    found.release()
    assert not list(Path(found.path).parent.glob("*.tmp-*"))
    return found.step, reasons


def together(rank: int, work: Callable[[], None]) -> None:
    """Something that one rank does while the others wait."""
    torch.distributed.barrier()
    if rank == 0:
        work()
    torch.distributed.barrier()


def write(levels: Levels, number: int, model: Model, step: int, rank: int) -> str | None:
    ledger = {"bytes": 7} if rank == 0 else {}
    return levels.save(number, step, fragments(model, ZERO_1, rank), meta(step, ledger=ledger))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(bytes(content))


def rank_of_hosts(folder: str) -> dict[str, object]:
    rank = torch.distributed.get_rank()
    as_host(rank)
    model, older, seen = Model(seed=1), Model(seed=2), {}
    levels, said = levels_at(folder, NEXT, ALONE), list[int]()
    talk = levels._communicator
    gather = talk.gather
    talk.gather = lambda value: (said.append(len(json.dumps(value))), gather(value))[1]  # type: ignore[method-assign]
    for step, values in ((5, older), (10, older), (15, model)):
        assert write(levels, 0, values, step, rank) is None
    assert write(levels, 1, model, 15, rank) is None
    seen["said"] = said[:]
    part = host_folder(folder, rank // 2)
    seen["kept"] = sorted(path.name for path in (part / "memory_of_2_hosts").iterdir())
    seen["files"] = len(list((part / "memory_of_2_hosts/step_00000015").rglob("rank_*")))
    opened = open_checkpoint(part / "disk/step_00000015", verify="checksums")
    seen["part"] = sorted(record.path[-9:-12:-1] for record in opened.records) and len(opened.records)
    seen["whole"] = read(levels, model, ZERO_1, rank)
    seen["layouts"] = [read(levels, model, layout, rank) for layout in OTHERS]
    seen["least"] = levels.newest(16)[0] is None
    seen["each its own"] = [read(levels_at(folder, ALONE), model, layout, rank) for layout in (ZERO_1, OTHERS[1])]

    # A host is lost, and another one with another name has come in its place.
    keep = Path(folder, "kept")
    together(rank, lambda: (shutil.copytree(f"{folder}/host1", keep), shutil.rmtree(f"{folder}/host1"), None)[-1])
    as_host(rank, f"new{rank // 2}" if rank >= 2 else None)
    new = levels_at(folder, NEXT, ALONE)
    seen["neighbour"] = [read(new, model, layout, rank) for layout in (ZERO_1, OTHERS[1])]
    alone = levels_at(folder, ALONE)
    seen["alone"] = read(alone, model, ZERO_1, rank)
    together(rank, lambda: (shutil.rmtree(f"{folder}/host1", True), shutil.copytree(keep, f"{folder}/host1"), None)[-1])

    # So is the first one, whose ranks send the others the list.
    as_host(rank, f"first{rank // 2}" if rank < 2 else None)
    seen["first host lost"] = read(levels_at(folder, NEXT), model, OTHERS[1], rank)

    # A bit flips: in one copy, then in both. The older save is whole, and no file system is asked to be right.
    as_host(rank)
    levels = levels_at(folder, NEXT)
    one, two = (host_folder(folder, host) / "memory_of_2_hosts/step_00000015" for host in (0, 1))
    name = "data/0000/rank_00001.safetensors"
    together(rank, lambda: flip(one / name, 5000))
    seen["one damaged"] = read(levels, model, ZERO_1, rank)
    before = (one / name).read_bytes()
    together(rank, lambda: flip(two / name, 5001))
    seen["both damaged"] = read(levels, older, ZERO_1, rank)
    seen["untouched"] = before == (one / name).read_bytes() != (two / name).read_bytes()
    together(rank, lambda: (one / "manifest.json").unlink())
    seen["manifest lost"] = read(levels, older, ZERO_1, rank)[0]
    seen["dropped"] = levels.drop(10), read(levels, older, ZERO_1, rank)[0]
    levels.remove()
    seen["removed"] = levels.newest(0)[0] is None
    return seen


def test_a_lost_host_is_replaced_by_its_neighbours_copy(tmp_path: Path) -> None:
    for rank, seen in enumerate(run(RANKS, rank_of_hosts, str(tmp_path))):
        assert seen["kept"] == ["step_00000010", "step_00000015"], "two, and nothing half-written"
        assert seen["files"] == 4 and seen["part"] == 2, "a host's own files, and with neighbours those of the other"
        assert seen["whole"] == (15, []) and seen["layouts"] == [(15, [])] * 3 and seen["least"]
        assert seen["said"] and max(seen["said"]) < 8, "a save tells all ranks the size of each file, and no more"
        assert seen["each its own"] == [(15, [])] * 2 and seen["first host lost"] == (15, [])
        assert seen["neighbour"] == [(15, [])] * 2
        assert seen["alone"] == (None, []), "without copies a lost host takes its part with it"
        assert seen["one damaged"] == (15, []), "the neighbour's copy is read"
        step, reasons = seen["both damaged"]
        assert (
            step == 10
            and "1 of 4 files are absent or damaged on every host" in reasons[0]
            and "rank_00001" in reasons[0]
        ), reasons
        assert seen["untouched"] and seen["manifest lost"] == 10
        lines, step = seen["dropped"]
        assert step == 10 and "step_00000015 deleted" in lines[0]
        assert seen["removed"], rank


def rank_of_four_hosts(folder: str) -> tuple[int | None, list[str]]:
    rank, model = torch.distributed.get_rank(), Model(seed=1)
    as_host(rank, f"host{rank}")
    levels = levels_at(folder, ALONE)
    assert write(levels, 0, model, 5, rank) is None
    found = read(levels, model, OTHERS[1], rank)
    levels.remove()
    return found


def test_the_index_goes_from_host_to_host(tmp_path: Path) -> None:
    """Of four hosts, the last one's comes from the second."""
    assert run(RANKS, rank_of_four_hosts, str(tmp_path)) == [(5, [])] * RANKS


def rank_that_is_refused(folder: str) -> dict[str, object]:
    rank = torch.distributed.get_rank()
    as_host(rank)
    model, seen, really = Model(seed=1), {}, level._write
    levels = levels_at(folder, NEXT)
    assert write(levels, 0, model, 10, rank) is None

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device", "/dev/shm")

    try:
        if rank == 3:
            level._write = full  # type: ignore[assignment]
        seen["full"] = write(levels, 0, model, 20, rank)
        seen["after"] = read(levels, model, ZERO_1, rank)
        if rank == 3:
            level._write = really
        send = courier.os.open

        def no_room(path: object, flags: int, *mode: int) -> int:  # a receiver whose disk is full
            if flags & os.O_CREAT:
                raise OSError(28, "No space left on device", str(path))
            return send(path, flags, *mode)

        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(courier, "os", SimpleNamespace(**{**vars(os), "open": no_room}))
            seen["receiver full"] = write(levels, 0, model, 20, rank), read(levels, model, ZERO_1, rank)[0]
        seen["again"] = write(levels, 0, model, 20, rank), read(levels, model, ZERO_1, rank)[0]
    finally:
        level._write = really
    try:
        levels_at(folder, NEXT.model_copy(update={"neighbours": 2}))
    except CheckpointError as error:
        seen["too few"] = str(error)
    # Two halves of two saves of one step are not one.
    levels, own = levels_at(folder, ALONE), host_folder(folder, 0)
    assert write(levels, 0, model, 30, rank) is None
    together(rank, lambda: os.rename(own / "disk", own / "first"))
    assert write(levels, 0, model, 30, rank) is None
    together(rank, lambda: (shutil.rmtree(own / "disk"), os.rename(own / "first", own / "disk"), None)[-1])
    seen["halves"] = levels.newest(30)[0] is None
    return seen


def test_a_full_memory_harms_nothing(tmp_path: Path) -> None:
    for seen in run(RANKS, rank_that_is_refused, str(tmp_path)):
        assert "rank 3" in seen["full"] and "No space left" in seen["full"] and "it was not saved" in seen["full"]
        assert seen["after"] == (10, []), "the save before is as it was"
        said, step = seen["receiver full"]
        assert "rank 0" in said and "No space left" in said and step == 10, "what was sent is taken: nobody hangs"
        assert seen["again"] == (None, 20)
        assert "neighbours must be fewer than the hosts: 2 of 2" in seen["too few"]
        assert seen["halves"]


def rank_whose_folder_is_gone(folder: str) -> dict[str, object]:
    """Somebody tidies up. Then a new host comes, whose disk refuses for a while."""
    rank = torch.distributed.get_rank()
    as_host(rank)
    model, seen = Model(seed=1), {}
    levels = levels_at(folder, NEXT)
    together(rank, lambda: [shutil.rmtree(f"{folder}/host{host}") for host in (0, 1)] and None)
    assert write(levels, 0, model, 10, rank) is None
    seen["mode"], seen["read"] = host_folder(folder, 1).stat().st_mode & 0o777, read(levels, model, ZERO_1, rank)
    seen["same"] = read(levels_at(folder, NEXT), model, ZERO_1, rank), "the next start takes it"
    as_host(rank, f"new{rank // 2}" if rank >= 2 else None)

    def read_only(path: Path) -> Path:
        raise OSError(30, "Read-only file system", str(path))

    with pytest.MonkeyPatch.context() as patch:
        if rank >= 2:
            patch.setattr(hosts, "private", read_only)
            patch.setattr(level, "private", read_only)
        try:
            levels_at(folder, NEXT)
        except CheckpointError as error:
            seen["first start"] = str(error)
        levels = levels_at(folder, NEXT, insist=False)
        seen["refused"], seen["neighbour"] = levels.refused, read(levels, model, ZERO_1, rank)
        seen["failed"] = write(levels, 0, model, 20, rank)
    seen["again"] = write(levels, 0, model, 20, rank), read(levels, model, ZERO_1, rank)
    seen["new"] = host_folder(folder, 0).parent.parent.joinpath("new1").is_dir()
    return seen


def test_a_folder_that_is_gone_or_refused_is_made_again(tmp_path: Path) -> None:
    for seen in run(RANKS, rank_whose_folder_is_gone, str(tmp_path)):
        assert seen["mode"] == 0o700, "nobody else may read the state"
        assert seen["read"] == seen["same"][0] == (10, [])
        assert "new1: [Errno 30] Read-only file system" in seen["first start"], "a mistake, as long as nothing has run"
        (line,) = seen["refused"]
        assert line.startswith("memory of 2 hosts of new1: [Errno 30] Read-only file system")
        assert seen["neighbour"] == (10, []), "a restart goes on with what the others have"
        assert "rank 2: " in seen["failed"] and "Read-only" in seen["failed"] and "rank 0" not in seen["failed"]
        assert seen["again"] == (None, (20, [])) and seen["new"]


def rank_that_leaves_a_branch(folder: str) -> dict[str, object]:
    """The second host's disk is read-only when the run goes back, and has all files: its own and its neighbour's."""
    rank = torch.distributed.get_rank()
    as_host(rank)
    old, new, seen = Model(seed=1), Model(seed=2), {}
    levels = levels_at(folder, NEXT)
    assert write(levels, 0, old, 10, rank) is None and write(levels, 0, old, 30, rank) is None

    def read_only(path: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    def there() -> list[list[str]]:
        torch.distributed.barrier()
        hosts = (host_folder(folder, host) / "memory_of_2_hosts" for host in (0, 1))
        return [sorted(path.name[-2:] for path in host.iterdir()) for host in hosts]

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(level, "remove", read_only)
        seen["dropped"], seen["left"] = levels.drop(10), there()
        seen["here"] = read(levels, old, ZERO_1, rank)
        levels = levels_at(folder, NEXT)
        seen["after a restart"] = read(levels, old, ZERO_1, rank)
        seen["not tidied"] = write(levels, 0, new, 20, rank), read(levels, new, ZERO_1, rank)[0], there()
    seen["tidied"] = write(levels, 0, new, 25, rank), read(levels, new, ZERO_1, rank)[0], there()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(all_levels, "replace_file", read_only)
        with pytest.raises(CheckpointError) as error:
            levels.drop(10)
        seen["no note"] = str(error.value)
    seen["as before"] = read(levels_at(folder, NEXT), new, ZERO_1, rank)[0]
    together(rank, lambda: Path(folder, "checkpoints/.levels").write_text("what") and None)
    with pytest.raises(CheckpointError, match=r"\.levels is damaged: remove it"):
        levels_at(folder, NEXT)
    return seen


def test_what_a_read_only_disk_keeps_of_a_branch_that_is_left_is_void(tmp_path: Path) -> None:
    for seen in run(RANKS, rank_that_leaves_a_branch, str(tmp_path)):
        deleted, kept = seen["dropped"]
        assert deleted == "step_00000030 deleted from checkpoint.levels: this run leaves that branch"
        assert kept.startswith("memory of 2 hosts of host1 keeps saves of the branch that this run leaves")
        assert "they are void: [Errno 30] Read-only file system" in kept and "step_00000030" in kept
        assert seen["left"] == [["10"], ["10", "30"]]
        assert seen["here"] == seen["after a restart"] == (10, []), "and not step 30, which is whole on one host"
        said, step, there = seen["not tidied"]
        assert "it was saved, but others could not be deleted" in said and "rank 2: " in said and step == 20
        assert there == [["10", "20"], ["10", "20", "30"]]
        assert seen["tidied"] == (None, 25, [["20", "25"]] * 2)
        assert "checkpoints" in seen["no note"] and "Read-only" in seen["no note"] and seen["as before"] == 25


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    assert private(tmp_path / "a/own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(CheckpointError, match="only this user owns"):
        private(tmp_path / "open")
    os.symlink(tmp_path / "a/own", tmp_path / "link")
    with pytest.raises(CheckpointError, match="only this user owns"):
        private(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user's")
def test_a_folder_that_another_user_has_taken_costs_only_its_saves(tmp_path: Path) -> None:
    """The level goes to another name, where all ranks and later starts find it. The owner is named."""
    assert own_folder(tmp_path / "deepy") == (tmp_path / "deepy", "")
    for taken in ("deepy", "deepy-1"):
        (tmp_path / taken).mkdir(exist_ok=True)
        os.chown(tmp_path / taken, 65534, 65534)
    for _ in range(2):
        folder, why = own_folder(tmp_path / "deepy")
        assert folder == tmp_path / "deepy-2" and folder.stat().st_mode & 0o777 == 0o700
        assert why == f"{tmp_path}/deepy-1 belongs to user nobody: {tmp_path}/deepy-2 is used"
    for number in range(2, 8):
        (tmp_path / f"deepy-{number}").mkdir(exist_ok=True)
        os.chown(tmp_path / f"deepy-{number}", 65534, 65534)
    with pytest.raises(CheckpointError, match="belongs to user nobody: remove it"):
        own_folder(tmp_path / "deepy")
    assert hint_for("checkpoint.levels: host1: /dev/shm/deepy-0-a-b: it must be a folder of this user's", 2) is None
