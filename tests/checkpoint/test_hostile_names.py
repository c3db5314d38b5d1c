"""Checkpoints of strangers: no name in them makes a reader touch a file outside their folder."""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import save_file

from megatron.checkpoint import CheckpointError, Fragment, FragmentSpec, open_checkpoint, save
from megatron.checkpoint.format.container import Inert, load_tensors
from megatron.checkpoint.format.index import checksum
from megatron.checkpoint.hf.importer import Folder
from megatron.checkpoint.hf.neox import layers_of
from megatron.checkpoint.save import transfer
from megatron.checkpoint.save.transfer import download, upload
from megatron.checkpoint.universal import export
from megatron.data.order.cache import cached
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.shard import LogicalTensor, Role
from tests.checkpoint.format.former_format import to_format_1
from tests.checkpoint.model import Model, Together, fragments, meta
from tests.checkpoint.rewritten import rewrite_head

NAMES = ["{outside}/stolen", "../../stolen", "data/../../../stolen", "data/../stolen", "a\nb", "", "CON"]


@pytest.fixture
def places(tmp_path):
    """(a whole checkpoint, a folder that no reader may touch)."""
    outside = tmp_path / "outside"
    outside.mkdir()
    return save(tmp_path / "bucket", 3, fragments(Model(seed=3), Layout(), 0), meta(3)), outside


def rewrite(path: Path, change) -> None:
    """The manifest after a change, with the checksum that belongs to it: a checksum is no signature."""
    content = json.loads(json.loads((path / "manifest.json").read_text())["content"])
    change(content)
    text = json.dumps(content)
    (path / "manifest.json").write_text(json.dumps({"checksum": checksum(text.encode()), "content": text}))


def move_file(content: dict, name: str) -> None:
    content["files"][0]["path"] = name


def move_part(content: dict, name: str) -> None:
    content["parts"][name] = content["parts"].pop("meta.json")


def add_part(content: dict, name: str) -> None:
    content["parts"][name] = content["parts"]["meta.json"]


def as_it_is(path: Path) -> Path:
    return path


CHANGES = [(as_it_is, move_part), (as_it_is, add_part)]
CHANGES += [(to_format_1, change) for change in (move_file, move_part, add_part)]


@pytest.mark.parametrize(("form", "change"), CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_cannot_make_a_download_write_elsewhere(places, tmp_path, name, form, change):
    path, outside = places
    form(path)
    name = name.format(outside=outside)
    rewrite(path, lambda content: change(content, name))
    # Answers of the hostile store: the file exists where the name points, as seen from the URL.
    (tmp_path / "stolen").write_text("theirs")
    here = tmp_path / "a" / "b" / "c"
    with pytest.raises(CheckpointError, match="manifest.json"):
        download(f"file://{path}", here, attempts=1)
    assert list(outside.iterdir()) == [] and [each for each in (tmp_path / "a").rglob("*") if each.is_file()] == []


@pytest.mark.parametrize("reader", [open_checkpoint, lambda path: upload(path, "memory://hostile", attempts=1)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("form", "change"), CHANGES)
def test_no_reader_follows_a_name_out_of_a_checkpoint(places, name, form, change, reader):
    path, outside = places
    form(path)
    shutil.copy(path / "data/0000/rank_00000.safetensors", outside / "stolen")
    shutil.copy(path / "data/0000/rank_00000.safetensors", path.parent.parent / "stolen")
    rewrite(path, lambda content: change(content, name.format(outside=outside)))
    with pytest.raises(CheckpointError):
        reader(path)


@pytest.mark.parametrize("url", ["file://{bucket}/..", "file://{bucket}/a\nb"])
def test_the_last_part_of_a_url_is_a_plain_name(places, tmp_path, url):
    with pytest.raises(CheckpointError, match="file name"):
        download(url.format(bucket=places[0].parent), tmp_path / "x" / "y", attempts=1)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "name", ["data/0000/rank_00000.safetensors", "index.safetensors", "meta.json", "manifest.json"]
)
def test_links_and_pipes_in_a_checkpoint_are_not_followed(places, name):
    path, outside = places
    shutil.move(path / name, outside / "file")
    (path / name).symlink_to(outside / "file")
    with pytest.raises(CheckpointError, match="leads out"):
        open_checkpoint(path, verify="sizes")
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(path, verify="sizes")  # and does not wait for somebody to write into it


def test_a_link_that_comes_later_is_not_followed_either(places):
    path, outside = places
    checkpoint = open_checkpoint(path, verify="checksums")
    shutil.move(path / "data/0000/rank_00000.safetensors", outside / "file")
    (path / "data/0000/rank_00000.safetensors").symlink_to(outside / "file")
    with pytest.raises(CheckpointError, match="leads out"):
        checkpoint.read(FragmentSpec.whole(checkpoint.tensors["norm.weight"], "master"))


@pytest.mark.parametrize("sizes", [{"begin": 1 << 60}, {"begin": -1}, {"end": -5}, {"size": 1.5}, {"size": None}])
def test_places_in_a_manifest_that_cannot_be_are_damage(places, sizes):
    path, _ = places
    to_format_1(path)
    rewrite(path, lambda content: content["files"][0].update(sizes))
    with pytest.raises(CheckpointError, match="manifest.json"):
        open_checkpoint(path, verify="checksums")


@pytest.mark.parametrize(
    "places_of_parts",
    [{"begin": 1 << 60}, {"begin": -1}, {"end": 9}, {"size": 1.5}, {"size": 1 << 40}, {"root": "xyz"}],
)
def test_places_in_an_index_that_cannot_be_are_damage(places, places_of_parts):
    path, _ = places
    rewrite(path, lambda content: content["parts"]["index.safetensors"].update(places_of_parts))
    with pytest.raises(CheckpointError, match="manifest.json"):
        open_checkpoint(path, verify="none")


@pytest.mark.parametrize("strange", [{"rank": -1}, {"begin": 1 << 60}, {"begin": -1}, {"end": -5}, {"size": 0}])
def test_records_of_files_that_cannot_be_are_damage(places, strange):
    """Each rank checks some of them, and all are notified of it."""
    path, _ = places
    checkpoint = open_checkpoint(path)
    (record,) = checkpoint.records
    rewrite_head(path, checkpoint.index, [replace(record, **strange)])
    results = Together(2).run(lambda member: open_checkpoint(path, verify="checksums", communicator=member))
    assert all(isinstance(each, CheckpointError) and "index.safetensors: damaged" in str(each) for each in results)


@pytest.mark.parametrize("change", [{"tensor": 1000}, {"tensor": -1}, {"state": 99}, {"dtype": -2}, {"first": 10**6}])
def test_groups_that_cannot_be_are_damage(places, change):
    path, _ = places
    checkpoint = open_checkpoint(path)
    for name, value in change.items():
        checkpoint.index.groups = checkpoint.index.groups.copy()
        checkpoint.index.groups[name][-1] = value
    rewrite_head(path, checkpoint.index, list(checkpoint.records))
    with pytest.raises(CheckpointError, match="index.safetensors: damaged"):
        open_checkpoint(path, verify="none")


def of_one_tensor(name: str) -> Fragment:
    return Fragment.empty(FragmentSpec.whole(LogicalTensor(name, (4,), Role.NORM), "master"), torch.float32)


@pytest.mark.parametrize("name", ["../../stolen", "/tmp/stolen-{unique}", "a/../../../stolen", "a\nb"])
def test_names_of_tensors_do_not_become_paths_elsewhere(tmp_path, name):
    unique = uuid4().hex  # pytest gives folders the same names again
    name = name.format(unique=unique)
    path = save(tmp_path, 1, [of_one_tensor(name)], meta(1))
    with pytest.raises(CheckpointError, match="file name"):
        export(open_checkpoint(path), tmp_path / "a" / "b" / "out")
    plain = save(tmp_path, 2, [of_one_tensor("w")], meta(2))
    with pytest.raises(CheckpointError, match="file name"):
        export(open_checkpoint(plain), tmp_path / "a" / "b" / "out", {"w": name})
    assert not (tmp_path / "a").exists() and not Path(f"/tmp/stolen-{unique}").exists()


@pytest.mark.parametrize("name", ["{outside}/model.safetensors", "../outside/model.safetensors", "", "a\nb"])
def test_an_index_of_hugging_face_stays_in_its_folder(tmp_path, name):
    model, outside = tmp_path / "model", tmp_path / "outside"
    model.mkdir()
    outside.mkdir()
    save_file({"w": torch.ones(2)}, outside / "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name.format(outside=outside)}}))
    with pytest.raises(CheckpointError, match="file name"):
        Folder(model)
    (model / "link.safetensors").symlink_to(outside / "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "link.safetensors"}}))
    with pytest.raises(CheckpointError, match="leads out"):
        Folder(model)


def test_the_hubs_cache_of_links_is_read(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    save_file({"w": torch.ones(2)}, blobs / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert Folder(snapshot).read("w").tolist() == [1.0, 1.0]
    (snapshot / "model.safetensors").unlink()
    save_file({"w": torch.ones(2)}, tmp_path / "elsewhere")
    (snapshot / "model.safetensors").symlink_to("../../../elsewhere")
    with pytest.raises(CheckpointError, match="leads out"):
        Folder(snapshot)


def test_layers_of_gpt_neox_are_files_of_the_folder(tmp_path):
    folder = tmp_path / "global_step1"
    folder.mkdir()
    (folder / "layer_00-model_00-model_states.pt").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="leads out"):
        layers_of(folder)


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc/x", "a\0b"])
def test_a_cache_entry_names_its_own_arrays(tmp_path, name):
    array = np.arange(3)
    (entry,) = [each for each in _made(tmp_path, array) if each.is_dir()]
    np.save(tmp_path.parent / "elsewhere.npy", array)
    size = (tmp_path.parent / "elsewhere.npy").stat().st_size
    (entry / "arrays.json").write_text(json.dumps({name: {"bytes": size}}))
    with pytest.warns(UserWarning, match="damaged"):
        made = cached(tmp_path, "kind", ("key",), lambda: {"a": array + 1})
    np.testing.assert_array_equal(made["a"], array + 1)  # built again, not read from elsewhere
    np.testing.assert_array_equal(np.load(tmp_path.parent / "elsewhere.npy"), array)


def _made(folder: Path, array: np.ndarray) -> list[Path]:
    cached(folder, "kind", ("key",), lambda: {"a": array})
    return list(folder.iterdir())


class Runs:
    def __reduce__(self):
        return os.mkdir, ("code-of-the-file-was-run",)


class Asked:
    """Written as `getattr(of, name)`, as Python 3.11.0 to 3.11.3 write a member of an enumeration."""

    def __init__(self, of, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


def test_members_of_another_programs_enumerations_are_not_looked_up(tmp_path):
    torch.save({"level": Asked(uuid.SafeUUID, "safe"), "w": torch.ones(2)}, tmp_path / "a.pt")
    found = load_tensors(tmp_path / "a.pt", inert=["uuid"])
    assert type(found["level"]) is Inert and found["level"].arguments == ("safe",) and found["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"not tensors \(.*getattr\)"):
        load_tensors(tmp_path / "a.pt")
    torch.save({"a": Asked(uuid.SafeUUID, "safe"), "b": Asked(torch.Size, "count")}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"not tensors \(builtins.getattr\)"):
        load_tensors(tmp_path / "b.pt", inert=["uuid"])


@pytest.mark.parametrize("new", [True, False], ids=["zip", "old"])
def test_a_pickle_with_code_is_refused_without_advice_to_run_it(tmp_path, monkeypatch, new):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Runs()}, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(CheckpointError) as caught:
        load_tensors(tmp_path / "a.pt")
    said = str(caught.value)
    assert "weights_only" not in said and "safe_globals" not in said
    if new:  # the old form is refused before torch checks what is in it: it cannot be mapped
        assert "mkdir" in said and "can run code" in said
    assert caught.value.__cause__ is None or "weights_only" not in str(caught.value.__cause__)
    assert not (tmp_path / "code-of-the-file-was-run").exists()


def test_a_store_of_a_stranger_is_bounded_in_size_and_time(places, tmp_path, monkeypatch):
    """A file that is longer than the manifest says, more than the disk has room for, and a store that never answers."""
    path = places[0]
    url = f"file://{path}"
    part = next(path.glob("data/*/*.safetensors"))
    content = part.read_bytes()
    part.write_bytes(content + bytes(1 << 20))
    with pytest.raises(CheckpointError, match=f"has {len(content) + (1 << 20)} bytes, and must have at most"):
        download(url, tmp_path / "a")
    part.write_bytes(content)
    monkeypatch.setattr(transfer, "free_bytes", lambda _: 10_000)
    with pytest.raises(CheckpointError, match="at most|has room for 10000"):
        download(url, tmp_path / "b")
    monkeypatch.setattr(transfer, "free_bytes", lambda _: None)
    monkeypatch.setattr(transfer, "PATIENCE", 0.05)
    release = threading.Event()
    monkeypatch.setattr(LocalFileSystem, "size", lambda *_: release.wait())
    with pytest.raises(CheckpointError, match="has not answered"):
        download(url, tmp_path / "c", attempts=2, wait=0.01)
    release.set()
    for name in "abc":
        assert not list((tmp_path / name).iterdir()), "nothing is left"
