"""Saving in the background, upload, and how errors come out."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from megatron.checkpoint import CheckpointError, Fragment, FragmentSpec, Meta, open_checkpoint, save
from megatron.checkpoint.format import rankfile
from megatron.checkpoint.save import saver as saver_module
from megatron.checkpoint.save.saver import Copies, Saver
from megatron.checkpoint.save.store import Store
from megatron.checkpoint.save.transfer import download, upload
from megatron.config.sections.output import CheckpointSection, LevelSection
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.shard import LogicalTensor, Role
from tests.checkpoint.model import Model, Together, fragments, meta

VECTOR = LogicalTensor("vector", (1000,), Role.NORM)


def fragment(value: float) -> Fragment:
    return Fragment(VECTOR, "master", 0, 1, 0, torch.full((1000,), value))


@pytest.fixture
def gate(monkeypatch):
    """Holds back the writing of background saves until it is set."""
    event, original = threading.Event(), saver_module.save

    def held(*arguments):
        assert event.wait(300)
        return original(*arguments)

    monkeypatch.setattr(saver_module, "save", held)
    return event


def test_background_save_has_the_values_of_its_moment(tmp_path, gate):
    """Training continues and changes the tensors while the disk is busy."""
    live = fragment(1.0)
    saver = Saver(tmp_path, CheckpointSection(asynchronous=True))
    saver.save(1, [live], Meta(1))
    live.data.fill_(2.0)
    assert saver.poll() == [] and list(tmp_path.iterdir()) == []
    gate.set()
    (saved,) = saver.wait()
    assert saved.path.name == "step_00000001" and 0 <= saved.stall <= saved.seconds
    assert torch.equal(open_checkpoint(saved.path).read(live.spec).data, torch.ones(1000))
    assert saver.close() == []


def test_a_second_save_waits_and_nothing_is_forgotten(tmp_path, gate):
    saver = Saver(tmp_path, CheckpointSection(asynchronous=True))
    saver.save(1, [fragment(1.0)], Meta(1))
    assert list(tmp_path.iterdir()) == []
    begin = time.monotonic()
    threading.Timer(0.3, gate.set).start()
    stall = saver.save(2, [fragment(2.0)], Meta(2))
    assert gate.is_set() and 0 < stall <= time.monotonic() - begin
    assert [saved.path.name for saved in saver.close()] == ["step_00000001", "step_00000002"]
    assert open_checkpoint(tmp_path / "step_00000002").read(fragment(0).spec).data[0] == 2


def test_an_error_in_the_background_comes_out_at_the_next_step(tmp_path):
    (tmp_path / "folder").write_text("in the way")
    saver = Saver(tmp_path / "folder", CheckpointSection(asynchronous=True))
    saver.save(1, [fragment(1.0)], Meta(1))
    with pytest.raises(CheckpointError, match="cannot be created"):
        for _ in range(100):
            saver.poll()
            time.sleep(0.02)
    (tmp_path / "folder").unlink()
    saver.save(2, [fragment(1.0)], Meta(2))
    assert [saved.path.name for saved in saver.close()] == ["step_00000002"]


def test_the_stall_is_a_copy_and_not_the_disk(tmp_path, gate):
    """A disk that takes until the step is over. The second save copies into warm memory."""
    big = LogicalTensor("big", (8 << 20,), Role.NORM)
    live = Fragment(big, "master", 0, 1, 0, torch.ones(8 << 20))
    saver = Saver(tmp_path, CheckpointSection(asynchronous=True))
    saver.prepare([live])
    stall = saver.save(1, [live], Meta(1))
    time.sleep(0.3)
    gate.set()
    (first,) = saver.wait()
    assert first.stall == stall <= first.seconds - 0.3
    assert torch.equal(open_checkpoint(first.path).read(live.spec).data, live.data)
    gate.clear()
    saver.save(2, [live], Meta(2))
    gate.set()
    saver.close()


def test_ranks_save_in_the_background_together(tmp_path):
    model, layout = Model(seed=9), Layout(tensor=2, data=2, zero_stage=1)

    def work(member):
        saver = Saver(tmp_path, CheckpointSection(asynchronous=True, keep_last=1), member)
        for step in (1, 2, 3):
            saver.save(step, fragments(model, layout, member.rank), meta(step))
        return [(saved.path.name, saved.deleted) for saved in saver.close()]

    expected = [("step_00000001", []), ("step_00000002", ["step_00000001"]), ("step_00000003", ["step_00000002"])]
    assert Together(4).run(work) == [expected] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
    checkpoint = open_checkpoint(tmp_path / "step_00000003", verify="checksums")
    for each in fragments(model, Layout(), 0):
        assert torch.equal(checkpoint.read(each.spec).data, each.data)


def stored(url: str, keep: int | str = "all", **more: object) -> CheckpointSection:
    return CheckpointSection(levels=[LevelSection(place="store", url=url, every="auto", keep=keep)], **more)


# -- elsewhere ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path) -> str:
    return f"file://{tmp_path}/bucket/run" if request.param == "file" else f"memory://bucket{tmp_path.name}/run"


def test_upload_and_back(tmp_path, url):
    model, layout = Model(seed=1), Layout(tensor=2, pipeline=2)

    def work(member):
        saver = Saver(tmp_path / "here", stored(url), member)
        saver.save(7, fragments(model, layout, member.rank), meta(7))
        return saver.close()

    results = Together(4).run(work)
    assert [saved.uploaded for (saved,) in results] == [f"{url}/step_00000007"] * 4
    path = download(f"{url}/step_00000007", tmp_path / "there")
    originals = sorted(each for each in (tmp_path / "here/step_00000007").rglob("*") if each.is_file())
    for original in originals:
        assert (path / original.relative_to(tmp_path / "here/step_00000007")).read_bytes() == original.read_bytes()
    assert Store(tmp_path / "there").resume().checkpoint.step == 7
    with pytest.raises(CheckpointError, match="exists already"):
        download(f"{url}/step_00000007", tmp_path / "there")
    with pytest.raises(CheckpointError, match=r"manifest.json: .*\(2 tries\)"):
        download(f"{url}/step_00000008", tmp_path / "there", attempts=2, wait=0.01)
    assert [each.name for each in (tmp_path / "there").iterdir()] == ["step_00000007"]


@pytest.fixture
def unreliable(monkeypatch):
    """A store that loses its connection the first `failures` times."""
    state = {"failures": 0, "calls": []}
    original = LocalFileSystem.put_file

    def put(self, source, target, **more):
        state["calls"].append(Path(target).name)
        if state["failures"] > 0:
            state["failures"] -= 1
            raise ConnectionError("connection lost")
        return original(self, source, target, **more)

    monkeypatch.setattr(LocalFileSystem, "put_file", put)
    return state


def test_upload_tries_again_and_the_manifest_goes_last(tmp_path, unreliable):
    saver = Saver(tmp_path / "here", CheckpointSection())
    saver.save(1, [fragment(1.0)], Meta(1))
    (saved,) = saver.close()
    unreliable["failures"] = 3
    upload(saved.path, f"file://{tmp_path}/there", attempts=4, wait=0.001)
    assert unreliable["calls"][-1] == "manifest.json" and len(unreliable["calls"]) == 4 + 3
    assert open_checkpoint(tmp_path / "there/step_00000001", verify="checksums").step == 1


def test_while_another_takes_its_place_there_is_no_manifest(tmp_path, unreliable):
    """A step that was uploaded by a branch that is left: until the new files are all there, it must not count as
    whole."""
    paths = [save(tmp_path / name, 1, [fragment(value)], Meta(1)) for name, value in (("old", 1.0), ("new", 2.0))]
    upload(paths[0], f"file://{tmp_path}/there")
    unreliable["failures"] = 10**6
    with pytest.raises(CheckpointError, match="connection lost"):
        upload(paths[1], f"file://{tmp_path}/there", attempts=1)
    assert not (tmp_path / "there/step_00000001/manifest.json").exists()
    unreliable["failures"] = 0
    upload(paths[1], f"file://{tmp_path}/there")
    there = open_checkpoint(tmp_path / "there/step_00000001", verify="checksums")
    assert there.read(FragmentSpec.whole(VECTOR, "master")).data[0] == 2.0


def test_an_upload_that_arrives_in_part_is_noticed(tmp_path, monkeypatch):
    saver = Saver(tmp_path / "here", CheckpointSection())
    saver.save(1, [fragment(1.0)], Meta(1))
    (saved,) = saver.close()
    monkeypatch.setattr(
        LocalFileSystem, "put_file", lambda self, source, target, **more: Path(target).write_bytes(b"x")
    )
    with pytest.raises(CheckpointError, match="1 of .* bytes arrived"):
        upload(saved.path, f"file://{tmp_path}/there", attempts=2, wait=0.001)


def test_an_outage_is_told_made_good_and_not_lost(tmp_path, unreliable, monkeypatch):
    """A checkpoint that could not be copied is kept from retention, and copied after the next save."""
    monkeypatch.setattr(
        saver_module, "upload", lambda *arguments, **more: upload(*arguments, **{"attempts": 2, "wait": 0.001, **more})
    )
    saver = Saver(tmp_path / "here", stored(f"file://{tmp_path}/there", keep_last=1))
    unreliable["failures"] = 10**6
    for step in (1, 2):
        saver.save(step, [fragment(step)], Meta(step))
        (saved,) = saver.wait()
        assert saved.uploaded is None and "connection lost" in saved.upload_problem and saved.deleted == []
    assert len(unreliable["calls"]) == 2 + 2 + 1  # it is waited for once per save, not once per file and checkpoint
    unreliable["failures"] = 0
    saver.save(3, [fragment(3.0)], Meta(3))
    (saved,) = saver.close()
    assert saved.upload_problem is None and saved.deleted == ["step_00000001", "step_00000002"]
    for step in (1, 2, 3):
        assert open_checkpoint(tmp_path / f"there/step_0000000{step}", verify="checksums").step == step


def test_never_uploaded_is_an_error_in_the_end(tmp_path, unreliable, monkeypatch):
    monkeypatch.setattr(saver_module, "upload", lambda *arguments, **_: upload(*arguments, attempts=1))
    saver = Saver(tmp_path / "here", stored(f"file://{tmp_path}/there"))
    unreliable["failures"] = 10**6
    saver.save(1, [fragment(1.0)], Meta(1))
    with pytest.raises(CheckpointError, match=r"(?s)never uploaded: step_00000001.*connection lost"):
        saver.close()


def test_what_a_killed_run_owed_is_uploaded_by_the_next(tmp_path, unreliable, monkeypatch):
    """Even by one that has nothing left to save."""
    monkeypatch.setattr(saver_module, "upload", lambda *arguments, **_: upload(*arguments, attempts=1))
    section = stored(f"file://{tmp_path}/there", keep_last=1)
    first = Saver(tmp_path / "here", section)
    first.save(1, [fragment(1.0)], Meta(1))
    assert first.wait()[0].uploaded
    unreliable["failures"] = 10**6
    first.save(2, [fragment(2.0)], Meta(2))
    assert first.wait()[0].uploaded is None  # and here it is killed
    unreliable["failures"] = 0
    assert Saver(tmp_path / "here", section).close() == []
    assert open_checkpoint(tmp_path / "there/step_00000002", verify="checksums").step == 2
    second = Saver(tmp_path / "here", section)
    unreliable["calls"].clear()
    second.save(3, [fragment(3.0)], Meta(3))
    second.close()
    assert len(unreliable["calls"]) == 4  # nothing twice
    back = Saver(tmp_path / "back", section)  # another branch, whose steps are not newer than what is there
    back.save(2, [fragment(2.5)], Meta(2))
    assert back.close()[0].uploaded == f"file://{tmp_path}/there/step_00000002"
    there = open_checkpoint(tmp_path / "there/step_00000002", verify="checksums")
    assert there.read(FragmentSpec.whole(VECTOR, "master")).data[0] == 2.5


def test_an_abandoned_branch_there_has_not_got_the_new_steps(tmp_path):
    """A run went back from 800 to 500, and was killed when 600 and 700 were saved and not copied yet."""
    there = f"file://{tmp_path}/there"
    for step in (500, 700, 800):
        upload(save(tmp_path / "old", step, [fragment(step)], Meta(step)), there)
    for step, value in ((500, 500), (600, 6.0), (700, 7.0)):
        save(tmp_path / "here", step, [fragment(value)], Meta(step))
    shutil.rmtree(tmp_path / "here/step_00000500")
    shutil.copytree(tmp_path / "old/step_00000500", tmp_path / "here/step_00000500")
    told = []
    copies = Copies(lambda step, copy: told.append((step, copy.url)))
    assert Saver(tmp_path / "here", stored(there), copies=copies).close() == []
    assert told == [(step, f"{there}/step_00000{step}") for step in (500, 600, 700)]
    for step, value in ((600, 6.0), (700, 7.0), (800, 800.0)):
        found = open_checkpoint(tmp_path / f"there/step_00000{step}", verify="checksums")
        assert found.read(FragmentSpec.whole(VECTOR, "master")).data[0] == value


def test_retention_elsewhere(tmp_path, monkeypatch):
    """A step that is half deleted or half uploaded goes the next time. A later state of the run is not counted among
    those to keep. Another run's stays."""
    there, original = f"file://{tmp_path}/there", LocalFileSystem.rm
    copies, section = Copies(), stored(there, keep=2)
    saver = Saver(tmp_path / "here", section, copies=copies)

    def after(step: int) -> list[int]:
        saver.save(step, [fragment(step)], Meta(step))
        assert saver.wait()[0].uploaded
        return sorted(int(path.name[-8:]) for path in (tmp_path / "there").iterdir())

    def refuses(*arguments: object, **more: object) -> None:
        raise PermissionError("not now")

    upload(save(tmp_path / "other", 1, [fragment(9.0)], Meta(1)), there)
    (tmp_path / "there/step_00000003").mkdir()
    assert [after(step) for step in (2, 4)] == [[1, 2, 3], [1, 2, 3, 4]]
    monkeypatch.setattr(LocalFileSystem, "rm", refuses)
    assert after(6) == [1, 2, 3, 4, 6] and not (tmp_path / "there/step_00000002/manifest.json").exists()
    monkeypatch.setattr(LocalFileSystem, "rm", original)
    assert after(8) == [1, 6, 8]
    copies.go_back(6)
    assert after(10) == [1, 6, 8, 10]  # 8 is of the branch that was left
    assert after(12) == [1, 10, 12]
    saver.close()


def test_memory_urls_are_really_elsewhere(tmp_path):
    saver = Saver(tmp_path, stored(f"memory://elsewhere{tmp_path.name}"))
    saver.save(1, [fragment(1.0)], Meta(1))
    saver.close()
    assert fsspec.filesystem("memory").exists(f"/elsewhere{tmp_path.name}/step_00000001/manifest.json")


def test_values_pass_through_two_windows_in_the_order_of_the_file(monkeypatch):
    """Of a device they do, where the host waits once per window. The windows are small here, and copies are done late:
    not before the host waits for them."""
    late, waits = list[tuple[torch.Tensor, torch.Tensor]](), list[int]()

    class Arrived:
        def record(self):
            self.count = len(late)

        def synchronize(self):
            waits.append(self.count)
            for place, piece in late[: self.count]:
                place.copy_(piece)
            del late[: self.count]

    class Device(torch.Tensor):
        is_cuda = True

    class Host(torch.Tensor):
        def copy_(self, piece, non_blocking):
            late.append((self.as_subclass(torch.Tensor), piece.as_subclass(torch.Tensor)))
            return self

    empty = torch.empty
    monkeypatch.setattr(rankfile, "CHUNK", 40)
    monkeypatch.setattr(rankfile, "WINDOW", 96)
    monkeypatch.setattr(torch.cuda, "Event", Arrived)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **rest: empty(*size, **rest).as_subclass(Host))
    narrow, wide = torch.bfloat16, torch.float32
    sizes = [(9, narrow), (0, wide), (31, wide), (5, torch.float64), (24, narrow)]
    tensors = [torch.arange(length, dtype=dtype) for length, dtype in sizes]
    values = rankfile.host_values([each.as_subclass(Device) for each in tensors])
    for number in (3, 2, 0, 4):
        pieces = [piece.as_subclass(torch.Tensor).clone() for piece in values(number)]
        assert torch.equal(torch.cat(pieces), tensors[number])
    assert waits == [2, 2, 3, 1]  # copies of 48, 48, 48, 48, 16, 32, 48 and 16 bytes in windows of 96
