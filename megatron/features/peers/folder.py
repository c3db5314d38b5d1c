"""The folder that peers share: a local one, or an object store behind an fsspec URL."""

import contextlib
import os
import stat
import sys
import uuid
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from megatron.config.registry import load
from megatron.curation.folder import Folder

from .options import TCP, PeersSection
from .signing import Signer

DRAFTS = (".draft", ".tmp")


class Unreadable(ValueError):
    """A file is too large, or no plain file."""


class SharedFolder(Folder):
    """Files that appear whole or not at all.

    `create` is what makes one ledger out of many writers. It is atomic on local and network file systems, and in stores
    whose fsspec class has conditional writes (S3, GCS).

    Attributes:
        largest: bytes of a file, at most.
    """

    largest = sys.maxsize

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that does not exist yet. Returns whether this call has made it."""
        system, root = self._place
        target = f"{root}/{name}"
        if not isinstance(system, LocalFileSystem):
            try:
                system.pipe_file(target, content, mode="create")
            except FileExistsError:
                return False
            return True
        draft = f"{name}.{uuid.uuid4().hex[:8]}.draft"
        self.write(draft, content)
        try:
            os.link(f"{root}/{draft}", target)  # fails where the target exists, also over NFS
            _keep(target.rpartition("/")[0])  # a power cut must not take a line back that peers have applied
        except FileExistsError:
            return False
        finally:
            self.delete(draft)
        return True

    def creates_once(self, name: str) -> bool:
        """Whether a second `create` of a file fails, as it must. A store may ignore the condition of a write."""
        probe = f"probes/{name}.{uuid.uuid4().hex}"
        try:
            return self.create(probe, b"1") and not self.create(probe, b"2") and self.read(probe) == b"1"
        finally:
            self.delete(probe)

    def read_up_to(self, name: str, limit: int) -> bytes | None:
        """A file of at most `limit` bytes. None if it does not exist.

        Raises:
            Unreadable: it is larger, or a link, pipe or device, which may have no end.
        """
        system, root = self._place
        path = f"{root}/{name}"
        try:
            if isinstance(system, LocalFileSystem):
                return _plain_file(path, name, limit)
            system.invalidate_cache()
            if (size := int(system.info(path)["size"])) > limit:
                raise Unreadable(f"{name} has {size} bytes, more than {limit}")
            return bytes(system.cat_file(path, start=0, end=size)) if size else b""
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted. A missing folder is empty."""
        system, root = self._place
        system.invalidate_cache()
        try:
            found = system.ls(f"{root}/{folder}", detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for path in found if not (name := path.rpartition("/")[2]).endswith(DRAFTS))

    def delete(self, name: str) -> None:
        system, root = self._place
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(f"{root}/{name}")

    def forget(self, kind: str, last: int) -> None:
        """Delete copies on this peer's own disk of rounds up to `last`, also of files that others have deleted."""

    def delete_empty(self, folder: str) -> None:
        """Remove a folder of a file system if it has nothing but drafts, which killed writers have left. A store has no
        folders."""
        system, root = self._place
        path = f"{root}/{folder}"
        if isinstance(system, LocalFileSystem):
            with contextlib.suppress(OSError):
                left = os.listdir(path)
                if all(each.endswith(DRAFTS) for each in left):
                    for each in left:
                        self.delete(f"{folder}/{each}")
                    os.rmdir(path)


def _keep(folder: str) -> None:
    """Have the disk keep the names in a folder."""
    opened = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems have no such call
        os.fsync(opened)
    os.close(opened)


def _plain_file(path: str, name: str, limit: int) -> bytes:
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise Unreadable(f"{name} is no plain file")
    if found.st_size > limit:
        raise Unreadable(f"{name} has {found.st_size} bytes, more than {limit}")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        return file.read(limit)


def folder_of(own: PeersSection, signer: Signer, url: str, files: Any = None) -> SharedFolder:
    """The folder of a path or URL. `files`: large files are with the peers."""
    found: SharedFolder = SharedFolder(url)
    if url.startswith(TCP):
        found = load(f"{__package__}.sockets:ServedFolder")(url, signer, own.run, own.name or "")
    if files is not None:
        found = load(f"{__package__}.direct:DirectFolder")(found, own, signer, files)
    return found
