"""Copy checkpoints to and from any fsspec URL (s3://, gs://, file://, memory://), with retries."""

import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from megatron.config.arithmetic.machine import free_bytes

from ..format.communicator import SOLO, Communicator, all_problems
from ..format.durable import MANIFEST, META, leftover_name, move, number_of, step_of
from ..format.errors import CheckpointError, Unreachable, describe_error
from ..format.index import INDEX_NAME
from ..format.manifest import open_index, part_of, read_manifest
from ..read.reader import open_checkpoint

MOST = 1 << 30  # bytes of a manifest, of meta data or of a ledger
PATIENCE, SLOWEST = 120.0, 1e5  # seconds without an answer, bytes a second


def upload(path: Path, url: str, communicator: Communicator = SOLO, *, attempts: int = 5, wait: float = 1.0) -> str:
    """Copy a checkpoint to `<url>/<name of its directory>`. The ranks share the files.

    The manifest goes last, so a copy with a manifest is complete.

    Args:
        attempts: tries per file.
        wait: seconds before the second try, doubled with each.

    Returns:
        URL of the copy.

    Raises:
        CheckpointError: on every rank, with the first file of each rank that could not be copied.
    """
    target = f"{url.rstrip('/')}/{path.name}"
    names, problems = [], []
    try:
        _, stored = open_index(path, read_manifest(path), None)
        names = [stored[number].path for number in range(communicator.rank, len(stored), communicator.size)]
        names += [INDEX_NAME, META] if communicator.rank == communicator.size - 1 else []
    except CheckpointError as error:
        problems = [str(error)]
    if not problems and communicator.rank == 0:  # of another branch's checkpoint of that step, about to be replaced
        problems = _persistent(lambda: _withdraw(f"{target}/{MANIFEST}"), MANIFEST, attempts, wait)
    if communicator.broadcast(problems):
        names = []
    for name in names:
        problems += _persistent(partial(_put, part_of(path, name), f"{target}/{name}"), name, attempts, wait)
        if problems:
            break  # the next file would fail as well
    problems = all_problems(communicator, problems)
    if not problems and communicator.rank == 0:
        problems = _persistent(lambda: _put(path / MANIFEST, f"{target}/{MANIFEST}"), MANIFEST, attempts, wait)
    problems = communicator.broadcast(problems)
    if problems:
        raise CheckpointError(target, ["it was not uploaded", *problems])
    return target


def download(url: str, directory: str | Path, *, attempts: int = 5, wait: float = 1.0) -> Path:
    """Copy a checkpoint from a URL into a folder of checkpoints, and verify every byte.

    Raises:
        Unreachable: it could not be copied.
        CheckpointError: it is missing or damaged.
    """
    target = part_of(Path(directory), url.rstrip("/").rsplit("/", 1)[-1])
    if target.exists():
        raise CheckpointError(target, "it exists already")
    draft = leftover_name(target, "tmp", uuid.uuid4().hex[:12])
    draft.mkdir(parents=True)
    try:
        _fetch(url, {MANIFEST: MOST}, draft, attempts, wait)
        manifest = read_manifest(draft)
        room = free_bytes(draft) or 1 << 60
        head = {INDEX_NAME: min(manifest.index.size, room), META: min(manifest.meta.size, MOST)}
        _fetch(url, head, draft, attempts, wait)
        sizes = {record.path: record.size for record in open_index(draft, manifest)[1]}
        if (needed := sum(sizes.values())) > room:
            raise CheckpointError(url, f"it has {needed} bytes, and {directory} has room for {room}: free some")
        _fetch(url, sizes, draft, attempts, wait)
        open_checkpoint(draft, verify="checksums")
        move(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def put_file(path: Path, url: str) -> None:
    """Copy a file that no checkpoint needs. A failure is ignored, since each save copies it again."""
    with suppress(Exception):  # every store has its own exceptions
        _put(path, url)


def fetch_file(url: str, target: Path, *, attempts: int = 5, wait: float = 1.0) -> bool:
    """Copy a file from a URL over the local one. Returns False, without a local one, if the store has no such file.

    Raises:
        Unreachable: the store gives no answer, or the file could not be copied.
    """
    target.unlink(missing_ok=True)
    if _is_lost(url):
        return False
    if problems := _persistent(partial(_get, url, target), target.name, attempts, wait):
        raise Unreachable(url, ["it cannot be read", *problems])
    return True


def newest(url: str) -> str:
    """The URL itself if it is a checkpoint, or of the newest complete checkpoint in that folder.

    Raises:
        Unreachable: the store cannot be read.
        CheckpointError: it has no complete checkpoint.
    """
    found, steps = _whole(url)
    if not found:
        raise CheckpointError(url, "there is no checkpoint" + (f" (incomplete: {', '.join(steps)})" if steps else ""))
    return found[-1]


def _whole(url: str) -> tuple[list[str], list[str]]:
    """URLs of complete checkpoints at a URL or in the folder there, oldest first, and names of all in it."""
    url = url.rstrip("/")
    try:
        system, root = fsspec.core.url_to_fs(url)
        if system.exists(f"{root}/{MANIFEST}"):
            return [url], []
        steps = _steps(system, root)
        whole = [f"{url}/{name}" for name in steps if system.exists(f"{root}/{name}/{MANIFEST}")]
    except Exception as error:  # every store has its own exceptions
        raise Unreachable(url, f"it cannot be read: {describe_error(error)}") from error
    return whole, steps


def _steps(system: Any, root: str) -> list[str]:
    names = [Path(found).name for found in system.ls(root, detail=False)] if system.isdir(root) else []
    return sorted((name for name in names if step_of(Path(name)) is not None), key=lambda name: number_of(Path(name)))


def retain_there(url: str, oldest: int, own: Collection[str]) -> list[str]:
    """Delete checkpoints of steps before `oldest` in a store's folder.

    Manifests go first, so a half-deleted one has none. Those without a manifest are deleted as well, as are unfinished
    uploads. Failed deletions are left for the next call.

    Args:
        own: URLs of checkpoints that may be deleted. Other complete ones belong to another run, and stay.

    Returns:
        Names of the deleted ones.
    """
    gone, url = [], url.rstrip("/")
    with suppress(Exception):  # every store has its own exceptions, and nothing depends on it
        system, root = fsspec.core.url_to_fs(url)
        system.invalidate_cache()
        for name in [name for name in _steps(system, root) if number_of(Path(name)) < oldest]:
            with suppress(Exception):
                place = f"{root}/{name}"
                if system.exists(f"{place}/{MANIFEST}"):
                    if f"{url}/{name}" not in own:
                        continue
                    system.rm_file(f"{place}/{MANIFEST}")
                system.rm(place, recursive=True)
                gone.append(name)
    return gone


def manifest_at(url: str) -> bytes | None:
    """The manifest of a checkpoint in a store. None if it is missing or incomplete.

    Raises:
        Unreachable: the store gives no answer.
    """
    try:
        system, place = fsspec.core.url_to_fs(f"{url.rstrip('/')}/{MANIFEST}")
        system.invalidate_cache()
        found: bytes | None = system.cat_file(place) if system.exists(place) else None
    except Exception as error:  # every store has its own exceptions
        raise Unreachable(url, f"it cannot be read: {describe_error(error)}") from error
    return found


def remote_manifest(url: str, *, attempts: int = 5, wait: float = 1.0) -> bytes:
    """The manifest of a checkpoint in a store. It identifies the checkpoint.

    Raises:
        Unreachable: it could not be read.
    """
    found: list[bytes] = []

    def read() -> None:
        system, place = fsspec.core.url_to_fs(f"{url.rstrip('/')}/{MANIFEST}")
        found.append(_within(PATIENCE, lambda: system.cat_file(place, end=MOST)))

    problems = _persistent(read, MANIFEST, attempts, wait)
    if problems:
        raise Unreachable(url, ["it cannot be read", *problems])
    return found[-1]


def _fetch(url: str, sizes: Mapping[str, int], draft: Path, attempts: int, wait: float) -> None:
    """Copy files. `sizes` has the most bytes of each."""
    problems, lost = [], 0
    for name, most in sizes.items():
        target, place = part_of(draft, name), f"{url.rstrip('/')}/{name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        wrong = _persistent(partial(_get, place, target, most), name, attempts, wait)
        lost += bool(wrong) and _is_lost(place)
        problems += wrong
    if problems:
        kind = CheckpointError if lost == len(problems) else Unreachable
        raise kind(url, ["it was not downloaded", *problems])


def _is_lost(url: str) -> bool:
    with suppress(Exception):  # every store has its own exceptions. The file may exist
        system, place = fsspec.core.url_to_fs(url)
        system.invalidate_cache()
        return not system.exists(place)
    return False


def _persistent(work: Callable[[], None], name: str, attempts: int, wait: float) -> list[str]:
    """Try several times. Returns the last error if all tries failed."""
    for attempt in range(attempts):
        try:
            work()
            return []
        except CheckpointError as error:  # the next try would find the same
            return [f"{name}: {describe_error(error)}"]
        except Exception as error:  # every store has its own exceptions. The last one is reported
            failure = error
            if attempt + 1 < attempts:
                time.sleep(wait * 2**attempt)
    return [f"{name}: {describe_error(failure)} ({attempts} tries)"]


def _put(source: Path, url: str) -> None:
    system, target = fsspec.core.url_to_fs(url)
    system.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
    system.put_file(str(source), target)
    system.invalidate_cache()
    size, arrived = source.stat().st_size, system.size(target)
    if arrived != size:
        raise OSError(f"{arrived} of {size} bytes arrived")


def _withdraw(url: str) -> None:
    system, place = fsspec.core.url_to_fs(url)
    if system.exists(place):
        system.rm_file(place)


def _get(url: str, target: Path, most: int = MOST) -> None:
    """Copy a file of at most `most` bytes. A store slower than `SLOWEST` bytes a second counts as unreachable."""
    system, source = fsspec.core.url_to_fs(url)
    size = _within(PATIENCE, lambda: system.size(source))
    if size is not None and size > most:
        raise CheckpointError(url, f"it has {size} bytes, and must have at most {most}")
    _within(PATIENCE + min(size or most, 1 << 40) / SLOWEST, lambda: system.get_file(source, str(target)))


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or raise its error. Work that takes too long is abandoned to its thread, and a
    TimeoutError raised."""
    answer: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

    def run() -> None:
        try:
            answer.put((work(), None))
        except BaseException as error:
            answer.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        found, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"the store has not answered in {seconds:.0f} s") from None
    if error is not None:
        raise error
    return found
