"""The tasks of a run, as steps of datatrove: one per shard, one that compares documents, one that writes the page.

A task is a function of the recipe and of the files that earlier tasks have written. It gives its files their names when
they are whole, so a killed one is started again and writes the same bytes."""

import hashlib
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from .folder import Folder, Lines, to_json
from .page import page
from .reading import Quarantined, documents
from .recipe import Recipe, Stage
from .shards import InputFile
from .stages import STAGES
from .stages.contract import Noted, Removed, Work
from .survivors import KeyTable, duplicates, repeated_lines

SAMPLES = 5  # documents that the page shows of each stage and reason
SHOWN = 600  # characters of a sample


@dataclass(frozen=True)
class Phase:
    """Stages on single documents, and what follows them: a comparison of all documents, or the end."""

    number: int  # from 0
    work: tuple[Stage, ...]  # stages on single documents
    compare: Stage | None  # the stage that compares, or None in the last phase
    before: Stage | None  # the stage that compared in the phase before

    @property
    def folder(self) -> str:
        """Where the documents of its end are."""
        return f"states/{self.number:02d}" if self.compare else "documents"


def phases_of(recipe: Recipe) -> list[Phase]:
    """The stages of a recipe, cut after each that compares documents."""
    found, work, before = list[Phase](), list[Stage](), None
    for stage in recipe.stages:
        if stage.inner or STAGES[stage.name].work:
            work.append(stage)
        else:
            found.append(Phase(len(found), tuple(work), stage, before))
            work, before = [], stage
    return [*found, Phase(len(found), tuple(work), None, before)]


def work_of(stage: Stage) -> Work:
    """The work of a stage on a document. Documents of other sources than its `only` are left as they are."""
    if stage.inner:
        work = escalated([(each.title, work_of(each)) for each in stage.inner])
    else:
        build = STAGES[stage.name].work
        assert build is not None
        work = build(stage.options)
    if not stage.only:
        return work
    return lambda document: work(document) if document.metadata["source"] in stage.only else None


def escalated(levels: list[tuple[str, Work]]) -> Work:
    """A document is removed if all levels would remove it. Each is asked only if the one before would."""

    def work(document: Document) -> Removed | Noted | None:
        details = list[str]()
        for title, level in levels:
            found = level(document)
            if not isinstance(found, Removed):
                if not details:
                    return None
                document.metadata["escalated"] = details
                return Noted(f"escalated, and kept by {title}")
            reason = found.reason
            details.append(f"{title}: {found.detail}")
        return Removed(reason, ". ".join(details))

    return work


@dataclass
class Account:
    """Counts of a task, and samples of the documents that it removed."""

    documents: dict[str, int] = field(default_factory=dict)  # that entered, by source
    characters: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    kept_characters: dict[str, int] = field(default_factory=dict)
    removed: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # stage -> reason -> source
    noted: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # stage -> what -> source
    quarantined: dict[str, dict[str, int]] = field(default_factory=dict)  # reason -> source
    samples: dict[str, dict[str, list]] = field(default_factory=dict)  # stage -> reason -> [order, id, detail, text]

    def sample(self, stage: str, reason: str, name: str, detail: str, text: str) -> None:
        """Keep the samples whose ids have the smallest hashes: a choice that no order of tasks changes."""
        kept = self.samples.setdefault(stage, {}).setdefault(reason, [])
        order = hashlib.blake2b(name.encode("utf-8"), digest_size=8).hexdigest()
        kept.append([order, name, detail, text[:SHOWN]])
        kept[:] = heapq.nsmallest(SAMPLES, kept)

    def note(self, stage: str, noted: Noted, source: str) -> None:
        _add(self.noted.setdefault(stage, {}).setdefault(noted.what, {}), source, noted.number)

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def _add(counts: dict[str, int], name: str, number: int = 1) -> None:
    counts[name] = counts.get(name, 0) + number


def _add_all(counts: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            _add_all(counts.setdefault(name, {}), value)
        else:
            _add(counts, name, value)


class Step(PipelineStep):
    """A step that a worker process receives by pickle. A quiet one switches datatrove's log off there."""

    type = "deepy"

    def __init__(self, recipe: Recipe, shards: list[list[InputFile]], quiet: bool) -> None:
        super().__init__()
        self.recipe, self.shards, self.quiet = recipe, shards, quiet
        self.folder = Folder(recipe.section.output)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.quiet:
            logger.disable("datatrove")


class ShardTask(Step):
    """Reads a shard, or what the phase before has left of it, and applies the stages of a phase."""

    name = "shard"

    def __init__(self, recipe: Recipe, shards: list[list[InputFile]], quiet: bool, phase: Phase) -> None:
        super().__init__(recipe, shards, quiet)
        self.phase = phase

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        folder, account = self.folder, Account()
        stages = [(each.title, work_of(each)) for each in self.phase.work]
        name, number = f"{rank:05d}", f"{self.phase.number:02d}"
        table = KeyTable(self.phase.compare) if self.phase.compare else None
        with (
            folder.lines(f"{self.phase.folder}/{name}.jsonl.zst") as kept,
            folder.lines(f"removed/{number}/{name}.jsonl.zst") as removed,
            folder.lines(f"quarantine/{number}/{name}.jsonl.zst") as quarantine,
        ):
            for document in self._documents(folder, rank, account, quarantine, removed):
                if self._kept(document, stages, account, quarantine, removed):
                    kept.add(_line(document))
                    source = document.metadata["source"]
                    _add(account.kept, source)
                    _add(account.kept_characters, source, len(document.text))
                    if table:
                        table.add(document)
        if table:
            folder.write(f"states/{number}/{name}.keys.npy", table.file())
        folder.write(f"states/{number}/{name}.counts.json", to_json(account.to_json()))
        yield from ()

    def _documents(
        self, folder: Folder, rank: int, account: Account, quarantine: Lines, removed: Lines
    ) -> Iterator[Document]:
        for document in self._input(folder, rank, account, removed):
            if isinstance(document, Quarantined):
                _quarantine(document, account, quarantine)
                continue
            _add(account.documents, document.metadata["source"])
            _add(account.characters, document.metadata["source"], len(document.text))
            yield document

    def _input(self, folder: Folder, rank: int, account: Account, removed: Lines) -> Iterator[Document | Quarantined]:
        if self.phase.before is None:
            sources = {each.name: each for each in self.recipe.section.sources}
            for file in self.shards[rank]:
                yield from documents(file, sources[file.source], self.recipe.section.limits)
            return
        before = self.phase.before
        former, lines = f"states/{self.phase.number - 1:02d}", STAGES[before.name].parts is not None
        doomed = {row: of for row, of in json.loads(folder.read(f"{former}/{rank:05d}.duplicates.json"))}
        for row, record in enumerate(folder.read_lines(f"{former}/{rank:05d}.jsonl.zst")):
            document = Document(record["text"], record["id"], metadata=record["metadata"])
            if row not in doomed:
                yield document
            elif not lines:
                _remove(document, before.title, Removed("duplicate", f"of {doomed[row]}"), account, removed)
            elif (left := _without(document.text, doomed[row])).strip():
                account.note(before.title, Noted("duplicate lines", len(doomed[row])), document.metadata["source"])
                document.text = left
                yield document
            else:
                _remove(document, before.title, Removed("all lines are duplicates"), account, removed)

    def _kept(
        self, document: Document, stages: list[tuple[str, Work]], account: Account, quarantine: Lines, removed: Lines
    ) -> bool:
        for title, work in stages:
            try:
                gone = work(document)
            except Exception as error:  # whatever a text does to a stage, the run continues without the document
                reason = f"stage {title} raised {type(error).__name__}"
                found = Quarantined(document.metadata["source"], document.id, 0, reason, str(error)[:SHOWN])
                _quarantine(found, account, quarantine)
                return False
            if isinstance(gone, Noted):
                account.note(title, gone, document.metadata["source"])
            elif gone is not None:
                _remove(document, title, gone, account, removed)
                return False
            if not document.text.strip():
                _remove(document, title, Removed("nothing is left of the text"), account, removed)
                return False
        return True


def _without(text: str, lines: list[int]) -> str:
    """The text without some of its lines, by their numbers from 0."""
    gone = set(lines)
    return "\n".join(each for number, each in enumerate(text.split("\n")) if number not in gone)


def _line(document: Document) -> dict[str, Any]:
    return {"id": document.id, "text": document.text, "metadata": document.metadata}


def _remove(document: Document, stage: str, gone: Removed, account: Account, removed: Lines) -> None:
    source = document.metadata["source"]
    _add(account.removed.setdefault(stage, {}).setdefault(gone.reason, {}), source)
    account.sample(stage, gone.reason, document.id, gone.detail, document.text)
    removed.add({"stage": stage, "reason": gone.reason, "detail": gone.detail, **_line(document)})


def _quarantine(found: Quarantined, account: Account, quarantine: Lines) -> None:
    _add(account.quarantined.setdefault(found.reason, {}), found.source)
    name = f"{found.source}/{found.file}" + (f":{found.record}" if found.record else "")
    account.sample("quarantine", found.reason, name, "", found.excerpt)
    quarantine.add(found.to_json())


class DecideTask(Step):
    """Reads the keys of all shards and writes, for each shard, the rows that are duplicates and what they are of."""

    name = "duplicates"

    def __init__(self, recipe: Recipe, shards: list[list[InputFile]], quiet: bool, phase: Phase) -> None:
        super().__init__(recipe, shards, quiet)
        self.phase = phase

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        folder, former = self.folder, f"states/{self.phase.number:02d}"
        tables = [np.load(folder.open(f"{former}/{number:05d}.keys.npy")) for number in range(len(self.shards))]
        priority = {each.name: each.priority for each in self.recipe.section.sources}
        ranks = [np.full(len(each), priority[shard[0].source]) for each, shard in zip(tables, self.shards)]
        compare = self.phase.compare
        assert compare is not None
        if STAGES[compare.name].parts:
            rows = repeated_lines(tables, ranks)
        else:
            starts, doomed, kept = duplicates(tables, ranks)
            names = self._names(folder, former, starts, np.unique(kept[doomed]))
            cuts = np.searchsorted(doomed, starts)
            rows = [
                [[each - first, names[int(kept[each])]] for each in doomed[begin:end].tolist()]
                for first, begin, end in zip(starts.tolist(), cuts, cuts[1:])
            ]
        for number, own in enumerate(rows):
            folder.write(f"{former}/{number:05d}.duplicates.json", to_json(own))
        yield from ()

    def _names(self, folder: Folder, former: str, starts: np.ndarray, wanted: np.ndarray) -> dict[int, str]:
        found = {}
        for number, first in enumerate(starts[:-1].tolist()):
            own = set(wanted[(wanted >= first) & (wanted < starts[number + 1])].tolist())
            if own:
                for row, record in enumerate(folder.read_lines(f"{former}/{number:05d}.jsonl.zst")):
                    if first + row in own:
                        found[first + row] = record["id"]
        return found


class PageTask(Step):
    """Adds up what all tasks have counted, and writes `report.json` and `report.html`."""

    name = "page"

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        folder, total = self.folder, Account()
        for phase in phases_of(self.recipe):
            for number in range(len(self.shards)):
                one = json.loads(folder.read(f"states/{phase.number:02d}/{number:05d}.counts.json"))
                _sum(total, one, first=phase.number == 0, last=phase.compare is None)
        report = total.to_json() | {
            "recipe": self.recipe.to_json(),
            "stages": [each.title for each in self.recipe.stages],
            "files": sum(map(len, self.shards)),
            "bytes": sum(file.size for shard in self.shards for file in shard),
        }
        folder.write("report.html", page(report).encode("utf-8"))
        folder.write("report.json", to_json(report))
        yield from ()


def _sum(total: Account, one: dict[str, Any], first: bool, last: bool) -> None:
    """Add what one task has counted. Documents enter in the first phase and are kept in the last."""
    names = [*(("documents", "characters") if first else ()), *(("kept", "kept_characters") if last else ())]
    for name in (*names, "noted", "quarantined", "removed"):
        _add_all(getattr(total, name), one[name])
    for stage, by_reason in one["samples"].items():
        for reason, samples in by_reason.items():
            kept = total.samples.setdefault(stage, {}).setdefault(reason, [])
            kept[:] = heapq.nsmallest(SAMPLES, [*kept, *samples])
