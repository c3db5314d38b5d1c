"""Contributions and states from peer to peer, with a folder that has the ledger and a small note of each file.

A peer keeps its large files on its own disk, and serves them to the members. It keeps what it has read from others too,
and serves that. So the contributions of a line can be read as long as one peer that has read them is there."""

import contextlib
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from megatron.config.problems import UserError

from .folder import SharedFolder, Unreadable
from .messages import HEAD_LIMIT, Refused, digest, unseal
from .options import TCP, PeersSection, is_address
from .signing import Signer
from .sockets import FolderServer, RemoteFolder, ServedFolder

LARGE = ("contributions", "states")
NOTE = 4096  # most bytes of a note


def split(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class OwnFiles:
    """The large files of this peer on its disk, and their server.

    Raises:
        UserError: the address cannot be used, or another process serves them.
    """

    def __init__(self, own: PeersSection, signer: Signer, place: Path) -> None:
        assert own.listen is not None and own.name is not None
        self.folder = SharedFolder(str(place))
        self.place, members = place, {*own.members}
        try:
            self._server = FolderServer(place, split(own.listen), own.run, members, signer, own.name, LARGE)
        except OSError as error:
            raise UserError(
                f"peers.listen = {own.listen} must be a free port at an address of this machine: {error}. Use another "
                "port, or end the process that has it"
            ) from error
        threading.Thread(target=self._server.serve_forever, args=(0.2,), name="peers files", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class DirectFolder(RemoteFolder):
    """The folder of the ledger, whose large files are with the peers. One thread uses it."""

    def __init__(self, base: SharedFolder, own: PeersSection, signer: Signer, files: OwnFiles) -> None:
        super().__init__(base.url)
        values = {"_base": base, "_own": own, "_signer": signer, "_files": files, "_peers": {}, "_rest": {}}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    _base: SharedFolder
    _own: PeersSection
    _signer: Signer
    _files: OwnFiles
    _peers: dict[str, tuple[str, ServedFolder]]  # address and connection of each member that was asked
    _rest: dict[str, float]  # when a member that did not answer is asked again

    def create(self, name: str, content: bytes) -> bool:
        if not _is_large(name):
            return self._base.create(name, content)
        before = self._note(name)
        if before is not None and before["sha256"] != digest(content):
            return False
        self._files.folder.write(name, content)
        return before is not None or self._base.create(name, _noted(content))

    def creates_once(self, name: str) -> bool:
        return self._base.creates_once(name)

    def write(self, name: str, content: bytes) -> None:
        if _is_large(name):
            self._files.folder.write(name, content)
            content = _noted(content)
        self._base.write(name, content)

    def names(self, folder: str) -> list[str]:
        return self._base.names(folder)

    def delete(self, name: str) -> None:
        self._base.delete(name)
        if name.startswith("contributions/"):  # with what was read from others for the same round
            shutil.rmtree((self._files.place / name).parent, ignore_errors=True)
        elif _is_large(name):
            self._files.folder.delete(name)

    def forget(self, kind: str, last: int) -> None:
        for round in self._files.folder.names(kind):
            if round.isdecimal() and int(round) <= last:
                path = self._files.place / kind / round
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def delete_empty(self, folder: str) -> None:
        self._base.delete_empty(folder)
        self._files.folder.delete_empty(folder)

    def read_up_to(self, name: str, limit: int) -> bytes | None:
        if not _is_large(name):
            return self._base.read_up_to(name, limit)
        note = self._note(name)
        if note is None:
            return None
        if note["bytes"] > limit:
            raise Unreadable(f"{name} has {note['bytes']} bytes, more than {limit}")
        kept = self._files.folder.read_up_to(name, limit)
        if kept is not None and digest(kept) == note["sha256"]:
            return kept
        author, problem = name.rpartition("/")[2].rpartition(".")[2], "no other peer has an address"
        others = [each for each in self._own.members if each not in (author, self._own.name)]
        for member in [author, *others] if author in self._own.members else others:
            if (begin := time.monotonic()) < self._rest.get(member, 0.0):
                continue
            try:
                found = self._from(member, name, note["bytes"])
            except (OSError, ValueError) as error:  # also of an address that is none
                problem = f"{member}: {error}"
                # A lost host takes long. At least half of the time is for the others.
                self._rest[member] = 2 * time.monotonic() - begin
                continue
            if found is not None and digest(found) == note["sha256"]:
                self._files.folder.write(name, found)
                return found
        raise OSError(f"{name} cannot be read from a peer ({problem})")

    def _note(self, name: str) -> dict[str, Any] | None:
        """Size and hash of a large file."""
        text = self._base.read_up_to(name, NOTE)
        if text is None:
            return None
        try:
            note = json.loads(text)
            if isinstance(note["sha256"], str) and type(note["bytes"]) is int and note["bytes"] >= 0:
                return {"sha256": note["sha256"], "bytes": note["bytes"]}
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise Unreadable(f"{name} is no note of a file")

    def _from(self, member: str, name: str, size: int) -> bytes | None:
        address = self._address(member)
        before = self._peers.get(member)
        if address is None or member == self._own.name:
            return None
        if before is None or before[0] != address:
            # Within a timeout: one that sends a byte now and then must not keep this peer.
            within = self._own.timeout
            folder = ServedFolder(f"{TCP}{address}", self._signer, self._own.run, self._own.name or "", member, within)
            self._peers[member] = address, folder
        return self._peers[member][1].read_up_to(name, size)

    def _address(self, member: str) -> str | None:
        """Where a member serves its files, as it has signed."""
        message = self._base.read_up_to(f"lives/{member}", HEAD_LIMIT)
        with contextlib.suppress(Refused):
            bound = {"kind": "life", "run": self._own.run, "round": 0, "peer": member}
            address = unseal(self._signer, message or b"", **bound)[0].get("address")
            if isinstance(address, str) and is_address(f"{TCP}{address}"):
                return address
        return None


def _is_large(name: str) -> bool:
    return name.partition("/")[0] in LARGE


def _noted(content: bytes) -> bytes:
    return json.dumps({"sha256": digest(content), "bytes": len(content)}).encode()
