"""Checkpoints outside our folders: behind a URL, or in Hugging Face's format."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from megatron.checkpoint.format.communicator import Communicator, from_rank_0
from megatron.checkpoint.format.durable import MANIFEST, META
from megatron.checkpoint.format.errors import Unreachable, brief
from megatron.checkpoint.format.index import checksum
from megatron.checkpoint.save.saver import Copies, Copy
from megatron.checkpoint.save.store import Resume, Store
from megatron.checkpoint.save.transfer import download, fetch_file, manifest_at, newest, put_file, remote_manifest
from megatron.config import Config
from megatron.config.tree import thaw
from megatron.report.ledger import Ledger, read_ledger

from ..world import World

FOLDER = "fetched"  # next to the run's own checkpoints
LEDGER, RUN_LEDGER = "ledger.jsonl", "run_ledger.jsonl"  # the second: of a run's folder, next to a fetched copy


def local_path(where: str, checkpoints: Path, communicator: Communicator, config: Config | None = None) -> str:
    """The checkpoint that `where` names, as a path that all ranks can read.

    Rank 0 downloads a URL, or writes the weights of a Hugging Face folder as a checkpoint, into
    `<checkpoints>/fetched`. A copy of an earlier start is verified and used again.

    Args:
        where: path or fsspec URL of a checkpoint, URL of a folder of checkpoints, or path of a folder with a Hugging
            Face model. Of several checkpoints the newest whole one is used.
        config: of a run that takes the weights. Its model may be a class of transformers, which keeps its own names.

    Raises:
        CheckpointError: on every rank, if it is missing, is damaged or cannot be converted.
    """
    given = Path(where)
    if "://" not in where and (not (given / "config.json").is_file() or (given / META).is_file()):
        return where
    path, failure = from_rank_0(
        communicator, lambda: str(fetched(where, checkpoints / FOLDER, config)), OSError, ValueError, CheckpointError
    )
    if failure:
        raise CheckpointError(where, failure)
    return str(path)


def weights_of(where: str, key: str, config: Config, communicator: Communicator) -> Checkpoint:
    """The checkpoint of weights that a key of the run names. All ranks call it.

    Raises:
        CheckpointError: on every rank.
    """
    folder = Path(config.checkpoint.dir)
    found = Store(folder, communicator).weights(local_path(where, folder, communicator, config), key=key).checkpoint
    assert found is not None  # one was named
    return found


def fetched(where: str, folder: Path, config: Config | None = None) -> Path:
    """The local copy. Its folder is named by a checksum of its source: names such as `step_00001000` are not unique."""
    for left in folder.glob("*/*.tmp-*"):  # of starts that were killed
        shutil.rmtree(left)
    if "://" in where:
        where = newest(where)
        target = folder / checksum(remote_manifest(where))[:16] / where.rsplit("/", 1)[-1]
        path = target if _intact(target) else download(where, target.parent)
        for level, name in ((2, RUN_LEDGER), (1, LEDGER)):  # of a run's folder, or of a store
            fetch_file(f"{where.rsplit('/', level)[0]}/{LEDGER}", path.parent / name)
        return path
    from megatron.checkpoint.hf.importer import import_class, import_model  # transformers is slow to import

    source, whole = Path(where).resolve(), config is not None and config.model.is_whole
    target = folder / (_state(source) + _settings(config)) / source.name
    if not _intact(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if whole:
            assert config is not None
            import_class(config, source, target)
        else:
            import_model(source, target)
    return target


def _settings(config: Config | None) -> str:
    """Changes with the settings of a class of transformers, which say what is read from a folder."""
    if config is None or not config.model.is_whole:
        return ""
    own = getattr(config.model, config.model.layers).model_dump()
    return f"-class-{checksum(json.dumps(thaw(own), sort_keys=True).encode())[:16]}"


def ledger_of(path: Path) -> Path | None:
    """Ledger of the run that saved a checkpoint of another folder, or None.

    A run's folder has it above the checkpoints. A store has it next to them. Several runs may share a store, so
    there it must list this checkpoint."""
    for of_run in (path.parent.parent / LEDGER, path.parent / RUN_LEDGER):
        if of_run.exists():
            return of_run
    if not (near := path.parent / LEDGER).exists():
        return None
    manifest = checksum((path / MANIFEST).read_bytes())
    known = any(manifest == entry.get("manifest") for entry in read_ledger(near))
    return near if known else None


def _state(source: Path) -> str:
    """Changes whenever a file of the folder is written."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.iterdir())
    return checksum(json.dumps([str(source), files]).encode())[:16]


def _intact(path: Path) -> bool:
    """Whether a whole copy exists. A damaged one is removed."""
    if not path.exists():
        return False
    try:
        open_checkpoint(path, verify="checksums")
    except CheckpointError:
        shutil.rmtree(path)
        return False
    return True


UPLOADED, LEFT = "uploaded", "copies_left"  # events of the ledger


def copies_of(path: Path, ledger: Ledger | None = None) -> Copies:
    """The run's uploads by its ledger: each event `uploaded`, except of steps that the run later returned from.

    Args:
        path: of the ledger, which need not exist.
        ledger: the same, open, which records further uploads.
    """

    def record(step: int, copy: Copy) -> None:
        with suppress(ValueError):  # closed, since the run has failed: its next start finds the copy in the store
            if ledger is not None:
                ledger.write(UPLOADED, step=step, url=copy.url, manifest=copy.manifest)
                put_file(ledger.path, f"{copy.url.rpartition('/')[0]}/{LEDGER}")

    told, copies = Copies(), Copies(record)
    for entry in read_ledger(path) if path.exists() else ():
        event = entry["event"]
        if event == UPLOADED:
            told.add(entry["step"], Copy(entry["url"], entry["manifest"]))
        elif event in ("rollback", LEFT):
            told.go_back(entry["to"])
        elif event in ("start", "resume"):
            told.go_back(entry["step"] if event == "resume" or "checkpoint" in entry else -1)
    copies.own, copies.urls = told.own, told.urls
    return copies


def leave_later(config: Config, after: int) -> None:
    """Record that the run goes back: if it is killed before it begins there, its next start must not use copies of
    later steps. Rank 0 calls it when it has put local checkpoints aside."""
    path = Path(config.run.dir) / "ledger.jsonl"
    later = [step for step in copies_of(path).own if step > after]
    if later:
        ledger = Ledger(path)
        ledger.write(LEFT, to=after, steps=sorted(later))
        ledger.close()


def or_uploaded(choose: Callable[[], Resume], store: Store, config: Config, world: World) -> tuple[Resume, bool]:
    """The nearest choice, or if that is older or missing, the newest copy that this run has in its store. If the choice
    is the newest known step, the store is not queried.

    Returns:
        The choice, and whether it is such a copy.

    Raises:
        CheckpointError: nothing can be used, or the run's uploaded copies are gone or cannot be reached.
    """
    level, failure, found = config.checkpoint.store, None, Resume(None)
    try:
        found = choose()
    except CheckpointError as error:
        failure = error
    if level is not None and config.checkpoint.resume == "auto":
        least = -1 if found.checkpoint is None else found.checkpoint.step
        copied = world.communicator.broadcast(_newest_own(config, store, least) if world.is_main else None)
        where, path, passed, problem = copied
        note = "".join(f". Skipped {each}" for each in passed)
        why = found.reason if found.checkpoint else str(failure) if failure else f"nothing is in {store.directory}"
        if where is not None:
            reason = f"resumed from {path}, which was fetched from {where}{note}. Nearer: {why}"
            if found.checkpoint is not None:
                found.checkpoint.release()
            return replace(store.resume(path), skipped=found.skipped, reason=reason), True
        if found.checkpoint is not None:
            note += f". {problem}" if problem else ""
            return replace(found, reason=f"{found.reason}{note}"), False
        if problem:
            raise CheckpointError(level.url, f"{problem}, and {why}")
    if failure is not None:
        raise failure
    return found, False


def _newest_own(config: Config, store: Store, least: int) -> tuple[str | None, str, list[str], str | None]:
    """On rank 0: (URL of this run's newest whole copy after more than `least` updates, its local path, newer copies
    with the reason for skipping them, the problem if any)."""
    path, passed = Path(config.run.dir) / "ledger.jsonl", list[str]()
    try:
        copies = copies_of(path)
    except (OSError, ValueError, KeyError, TypeError) as error:  # raising here would leave the other ranks waiting
        problem = f"{path} cannot be read ({type(error).__name__}: {error}), which names what was uploaded"
        return None, "", passed, problem
    try:
        for step in sorted((step for step in copies.own if step > least), reverse=True):
            copy = copies.own[step]
            manifest = manifest_at(copy.url)
            why = "it is gone" if manifest is None else ""
            if manifest is not None and checksum(manifest) != copy.manifest:
                why = "it is not known to be the one that this run has uploaded"
            try:
                if not why:
                    return copy.url, str(fetched(copy.url, store.directory / FOLDER)), passed, None
            except Unreachable:
                raise
            except CheckpointError as error:
                why = f"damaged ({brief(error.problems)})"
            passed.append(f"{copy.url}: {why}")
    except (CheckpointError, OSError) as error:
        return None, "", passed, str(error)
    if not passed:
        return None, "", [], None
    advice = "name a checkpoint in checkpoint.resume, or set it to none for a new start"
    return None, "", passed, f"of the copies that this run has uploaded none can be used ({brief(passed)}): {advice}"
