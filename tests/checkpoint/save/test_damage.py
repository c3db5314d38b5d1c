"""Whatever happens to a save or to a file: the error names it, and an intact checkpoint is found."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import CheckpointError, Fragment, FragmentSpec, open_checkpoint, save
from megatron.checkpoint.save.store import Store
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.shard import LogicalTensor, Role
from tests.checkpoint.model import Model, Together, fragments, meta
from tests.checkpoint.processes import child, ended

LAYOUT = Layout(tensor=2, data=2, zero_stage=1)


def write(directory: Path, step: int, layout: Layout = LAYOUT) -> Path:
    model = Model(seed=step)
    results = Together(layout.world_size).run(
        lambda member: save(directory, step, fragments(model, layout, member.rank), meta(step), member)
    )
    assert all(isinstance(result, Path) for result in results), results
    return results[0]


def assert_holds(path: Path, step: int) -> None:
    """The checkpoint has, bit for bit, the model of its step."""
    model, checkpoint = Model(seed=step), open_checkpoint(path, verify="checksums")
    assert checkpoint.step == step and checkpoint.meta.data == {"samples": step * 8}
    for fragment in fragments(model, Layout(), 0):
        assert torch.equal(checkpoint.read(fragment.spec).data, fragment.data)


# -- killed ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory where there is one: a killed process leaves the same there, without waiting for a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def save_for_ever(directory: Path, first: int) -> None:
    for step in range(first, first + 1000):
        save(directory, step, fragments(Model(seed=step), Layout(), 0), meta(step))
        Store(directory).retain(2)


@pytest.mark.tour
def test_kill_at_random_moments(quick_path):
    """Each time the newest intact checkpoint is whole and is what that step saved. Nothing of the kill stays behind."""
    chance, step, longest = random.Random(5), 0, 0.1
    for _ in range(30):
        process = child(save_for_ever, quick_path, step + 1)
        time.sleep(chance.uniform(0.0, longest))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        store = Store(quick_path)
        store.clean()
        assert all(path.name.startswith("step_") and path.name.count(".") == 0 for path in quick_path.iterdir())
        found = store.resume("auto")
        assert found.skipped == []
        if found.checkpoint:
            assert found.checkpoint.step >= step
            longest *= 1.0 if found.checkpoint.step > step else 1.2  # on a busy machine a save takes longer
            step = found.checkpoint.step
            assert_holds(found.checkpoint.path, step)
        else:
            longest *= 1.5
    assert step > 0


def few(step: int) -> list[Fragment]:
    return fragments(Model(seed=step), Layout(), 0)[:5]


CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


def save_again(directory: Path, step: int) -> None:
    save(directory, step, few(step), meta(step))
    Store(directory).retain(1)


def die_at_call(number: int, work) -> None:
    """Do `work`, but be killed just before the number-th call of the system that changes something."""
    left = number

    def counted(original):
        def call(*arguments, **named):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return call

    originals = {name: getattr(os, name) for name in CALLS}
    for name, original in originals.items():
        setattr(os, name, counted(original))
    work()
    for name, original in originals.items():  # how the process ends is not what is tested
        setattr(os, name, original)


@pytest.mark.tour
@pytest.mark.parametrize("replacing", [False, True], ids=["new step", "same step again"])
def test_kill_before_every_system_call(quick_path, replacing):
    """Not at random: every single place where a save can be cut, including the replacement of an existing step."""
    number, survived = 0, False
    while not survived:
        directory = quick_path / str(number)
        save(directory, 1, few(1), meta(1))
        step = 1 if replacing else 2
        status = ended(die_at_call, number, partial(save_again, directory, step))
        survived = status == 0
        assert survived or status == -signal.SIGKILL
        store = Store(directory)
        store.clean()
        found = store.resume("auto")
        assert found.checkpoint is not None and not found.skipped
        for fragment in few(found.checkpoint.step):
            assert torch.equal(found.checkpoint.read(fragment.spec).data, fragment.data)
        assert {path.name for path in directory.iterdir()} == {path.name for path in store.paths()}
        shutil.rmtree(directory)
        number += 1
    assert number > 20


# -- cannot be written -------------------------------------------------------------------------------------------------


def too_large(directory: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        save(directory, 2, fragments(Model(seed=2), Layout(), 0), meta(2))
    except CheckpointError as error:
        (directory / "message").write_text(str(error))


def test_no_room_for_a_file(tmp_path):
    write(tmp_path, 1)
    assert ended(too_large, tmp_path) == 0
    message = (tmp_path / "message").read_text()
    assert "step_00000002" in message and "rank 0" in message and os.strerror(errno.EFBIG) in message
    assert "rank_00000.safetensors" in message
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step_00000001"]
    assert_holds(tmp_path / "step_00000001", 1)


def test_disk_full_on_one_rank_is_an_error_on_all(tmp_path, monkeypatch):
    write(tmp_path, 1)
    model, original = Model(seed=2), os.write

    def full(handle, data):
        if "rank_00002" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(handle, data)

    monkeypatch.setattr(os, "write", full)
    results = Together(4).run(lambda member: save(tmp_path, 2, fragments(model, LAYOUT, member.rank), meta(2), member))
    assert all(isinstance(result, CheckpointError) for result in results)
    assert all("rank 2: " in str(result) and "No space left" in str(result) for result in results)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert_holds(tmp_path / "step_00000001", 1)


@pytest.mark.parametrize("name", ["index.safetensors", "meta.json", "manifest.json"])
def test_disk_full_while_committing(tmp_path, monkeypatch, name):
    write(tmp_path, 1, Layout())
    original = os.write

    def full(handle, data):
        if os.readlink(f"/proc/self/fd/{handle}").endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(handle, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, 1, fragments(Model(seed=1), Layout(), 0), meta(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert_holds(tmp_path / "step_00000001", 1)


def test_any_error_of_a_rank_reaches_all(tmp_path):
    """Even one that has nothing to do with the disk: no rank waits for one that gave up."""

    def work(member):
        def mine():
            yield from fragments(Model(), LAYOUT, member.rank)
            if member.rank == 3:
                raise RuntimeError("device lost")

        return save(tmp_path, 1, mine(), meta(1), member)

    results = Together(4).run(work)
    assert all("rank 3: RuntimeError: device lost" in str(result) for result in results)
    assert isinstance(results[3].__cause__, RuntimeError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: [replace(found[0], start=1, data=found[0].data[1:].clone()), *found[1:]],
            "no rank wrote elements 0 to 1",
        ),
        (lambda found: [*found, found[0]], "same fragment twice"),
        (lambda found: [*found, replace(found[0], data=found[0].data[:-1].clone())], "same fragment twice"),
        (lambda found: [*found, replace(found[0], start=1, data=found[0].data[1:].clone())], "were written twice"),
        (lambda found: [replace(found[0], data=found[0].data[:-2].clone()), *found[1:]], "no rank wrote elements"),
        (
            lambda found: [
                *found,
                Fragment(LogicalTensor("norm.weight", (5,), Role.NORM), "weight", 0, 1, 1, torch.zeros(4)),
            ],
            "two tensors",
        ),
        (
            lambda found: [*found, replace(found[0], tensor_ranks=2, start=99, data=found[0].data[:1].clone())],
            "cut over 1 and over 2 tensor parallel ranks at once",
        ),
        (
            lambda found: [
                replace(found[0], data=found[0].data[:3].clone()),
                replace(found[0], start=3, data=found[0].data[3:].double()),
                *found[1:],
            ],
            "different types",
        ),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, change, message):
    found = [fragment for fragment in fragments(Model(), Layout(), 0) if fragment.data.numel() > 4]
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, 1, change(found), meta(1))
    assert list(tmp_path.iterdir()) == []


def test_meta_data_that_json_cannot_hold(tmp_path):
    """Only rank 0 writes them, but no rank may wait for ever."""
    results = Together(2).run(
        lambda member: save(
            tmp_path, 1, fragments(Model(), Layout(tensor=2), member.rank), meta(1, extra={"path": tmp_path}), member
        )
    )
    assert all("TypeError" in str(result) and isinstance(result, CheckpointError) for result in results)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_parallel_rank_that_wrote_nothing(tmp_path):
    model, layout = Model(), Layout(tensor=2)
    results = Together(2).run(
        lambda member: save(tmp_path, 1, [] if member.rank else fragments(model, layout, 0), meta(1), member)
    )
    assert all("embedding.weight (weight): no rank wrote elements 0 to " in str(result) for result in results)


# -- damaged afterwards ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    write(directory, 1)
    write(directory, 2)
    return directory


@pytest.fixture
def directory(pair, tmp_path) -> Path:
    shutil.copytree(pair, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def assert_skipped(directory: Path, *words: str) -> None:
    """The newest is refused with these words. `auto` falls back to the one before and says so."""
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(directory / "step_00000002", verify="checksums")
    for word in words:
        assert word in str(error.value)
    found = Store(directory).resume("auto")
    assert found.checkpoint.step == 1 and [path.name for path, _ in found.skipped] == ["step_00000002"]
    for word in words:
        assert word in found.reason
    assert_holds(found.checkpoint.path, 1)
    with pytest.raises(CheckpointError):
        Store(directory).resume(str(directory / "step_00000002"))


def test_truncated_file(directory):
    path = directory / "step_00000002" / "data/0000/rank_00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert_skipped(directory, "rank_00001.safetensors", "bytes instead of")


def test_a_file_that_is_too_long(directory):
    path = directory / "step_00000002" / "data/0000/rank_00001.safetensors"
    path.write_bytes(path.read_bytes() + b"!")
    assert_skipped(directory, "rank_00001.safetensors", "bytes instead of")


def test_lost_file(directory):
    (directory / "step_00000002" / "data/0000/rank_00003.safetensors").unlink()
    assert_skipped(directory, "rank_00003.safetensors is lost")


@pytest.mark.parametrize("name", ["index.safetensors", "meta.json", "manifest.json"])
def test_lost_or_truncated_part(directory, name):
    path = directory / "step_00000002" / name
    os.truncate(path, path.stat().st_size // 2)
    assert_skipped(directory, name)
    path.unlink()
    assert_skipped(directory, name)


def test_every_flipped_byte_is_found(directory):
    """A bit at many random places of every file of the checkpoint, one at a time."""
    chance, root = random.Random(1), directory / "step_00000002"
    for path in sorted(each for each in root.rglob("*") if each.is_file()):
        size = path.stat().st_size
        for place in [0, 9, size - 1, *(chance.randrange(size) for _ in range(8))]:
            flip(path, place)
            with pytest.raises(CheckpointError) as error:
                open_checkpoint(root, verify="checksums")
            assert path.name in str(error.value), (path, place)
            flip(path, place)
    assert_holds(root, 2)


def test_a_flipped_value_names_the_tensor(directory):
    checkpoint = open_checkpoint(directory / "step_00000002")
    row = checkpoint.index.find("layers.1.mlp.down.weight", "exp_avg")[0]
    record = checkpoint.records[row["file"]]
    flip(checkpoint.path / record.path, int(row["offset"]))
    assert_skipped(directory, "layers.1.mlp.down.weight (exp_avg)", record.path, "checksum")


def test_all_damaged_is_an_error_not_a_fresh_start(directory):
    for path in directory.iterdir():
        (path / "data/0000/rank_00000.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        Store(directory).resume("auto")
    assert "step_00000001" in str(error.value) and "step_00000002" in str(error.value)


def test_damage_seen_by_one_rank_is_an_error_on_all(directory):
    path = directory / "step_00000002"
    flip(path / "data/0000/rank_00002.safetensors", -1)
    results = Together(3).run(lambda member: open_checkpoint(path, verify="checksums", communicator=member))
    assert all(isinstance(result, CheckpointError) and "rank_00002" in str(result) for result in results)
    assert len({str(result) for result in results}) == 1


def test_a_file_that_shrinks_after_it_was_opened(directory):
    checkpoint = open_checkpoint(directory / "step_00000002")
    for path in (directory / "step_00000002").glob("data/*/*"):
        os.truncate(path, 3000)
    with pytest.raises(CheckpointError, match=r"rank_0000.*3000 bytes instead of"):
        checkpoint.read(FragmentSpec.whole(checkpoint.tensors["embedding.weight"], "master"))


def test_a_file_lost_while_loading_is_an_error_on_all(directory):
    """Also on ranks that did not need it: they would wait for the others in the first step."""
    checkpoint, layout = open_checkpoint(directory / "step_00000002"), Layout(pipeline=3)
    (directory / "step_00000002" / "data/0000/rank_00003.safetensors").unlink()

    def work(member):
        targets = [Fragment.empty(each.spec, each.data.dtype) for each in fragments(Model(), layout, member.rank)]
        return checkpoint.read_into(targets if member.rank else targets[:1], communicator=member)

    results = Together(3).run(work)
    assert all(isinstance(result, CheckpointError) and "rank_00003" in str(result) for result in results)


def test_the_newer_version_is_told(directory):
    path = directory / "step_00000002" / "manifest.json"
    outer = json.loads(path.read_text())
    from megatron.checkpoint.format.index import checksum

    outer["content"] = outer["content"].replace('"format": 2', '"format": 3')
    outer["checksum"] = checksum(outer["content"].encode())
    path.write_text(json.dumps(outer))
    with pytest.raises(CheckpointError, match="its format is 3. This version reads 1 to 2"):
        open_checkpoint(directory / "step_00000002")
