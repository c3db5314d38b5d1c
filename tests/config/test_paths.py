"""Names from files: none leads out of the folder it is joined to."""

import os
import socket

import pytest

from megatron.config.file_access import UnsafeName, path_inside

HOSTILE = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "//etc/passwd",
    "../x",
    "a/../../x",
    "a/..",
    "a//b",
    "a/",
    "./a",
    "..\\x",
    "a\nb",
    "a\0b",
    "a\x1b[31mb",
    "a\x7f",
    "a\u2028b",
    "a\x85b",
    "\udcff",
    "CON",
    "data/nul.safetensors",
    "com1",
    "x" * 300,
    None,
    7,
    ["a"],
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(tmp_path, name):
    with pytest.raises(UnsafeName):
        path_inside(tmp_path, name)


@pytest.mark.parametrize(
    "name", ["a", "data/0000/rank_00000.safetensors", "..a", "a..b", ".hidden", "ü", "console", "a b"]
)
def test_plain_names_are_joined(tmp_path, name):
    assert path_inside(tmp_path, name) == tmp_path / name


def test_links_may_not_leave_the_folder(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "folder-beside"
    folder.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("x")
    (folder / "real").write_text("y")
    (folder / "link").symlink_to("real")
    (folder / "out").symlink_to(outside / "secret")
    (folder / "beside").symlink_to(outside)
    (folder / "dangling").symlink_to(tmp_path / "not-yet")
    (folder / "loop").symlink_to(folder / "loop")
    assert path_inside(folder, "link").read_text() == "y"
    for name in ("out", "beside/secret", "beside/new", "dangling"):
        with pytest.raises(UnsafeName, match="link"):
            path_inside(folder, name)
        assert path_inside(folder, name, root=tmp_path) == folder / name
    with pytest.raises(OSError):
        path_inside(folder, "loop").read_text()


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert path_inside(tmp_path / "link", "a").read_text() == "x"


def test_pipes_sockets_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        (tmp_path / "device").symlink_to("/dev/zero")
        for name in ("pipe", "socket", "device"):
            with pytest.raises(UnsafeName):
                path_inside(tmp_path, name)
        with pytest.raises(UnsafeName, match="neither"):
            path_inside(tmp_path, "device", root="/")
