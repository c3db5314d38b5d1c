"""Lines that stand in several documents, domains, and stages of some sources only."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("datatrove")

from datatrove.data import Document  # noqa: E402

from megatron.config.problems import ConfigError  # noqa: E402
from megatron.curation.signals import normalised  # noqa: E402
from megatron.curation.stages import STAGES  # noqa: E402
from megatron.data.errors import DataError  # noqa: E402
from tests.curation.recipes import curate, kept, lines, recipe, tree, written  # noqa: E402


@pytest.mark.parametrize("by", ["text", "normalised"])
def test_each_line_stays_once_as_brute_force_says(by: str, tmp_path: Path) -> None:
    """Of two sources the later one has the smaller priority, so its lines stay. With one worker and with two."""
    draw, sources, documents = random.Random(8), [], []
    for name, priority in (("web", 2), ("books", 1)):
        for file in ("a.jsonl", "b.jsonl"):
            texts = [
                "\n".join(
                    draw.choice(("Line", "line,", "", "x")) + f" {draw.randrange(30)}" * draw.randrange(2)
                    for _ in range(5)
                )
                for _ in range(12)
            ]
            written(tmp_path, name, texts, file)
            documents += [
                (priority, name, f"{name}/{file}:{n}", text) for n, text in enumerate(texts, 1) if text.strip()
            ]
        sources.append({"name": name, "path": str(tmp_path / name), "priority": priority})
    seen, expected = set(), {}
    for _, _, name, text in sorted(documents, key=lambda each: each[0]):
        left = []
        for line in text.split("\n"):
            view = line.strip() if by == "text" else normalised(line)
            if len(view) < 2 or view not in seen:
                left.append(line)
            seen |= {view} if len(view) >= 2 else set()
        if "\n".join(left).strip():
            expected[name] = "\n".join(left)
    stages = [{"lines": {"by": by, "least": 2}}]
    report = curate(tmp_path, stages, sources, shard_bytes=1)
    assert {each["id"]: each["text"] for each in lines(tmp_path / "out/documents")} == expected
    gone = report["removed"]["01_lines"]["all lines are duplicates"]
    assert sum(gone.values()) == len(documents) - len(expected) > 0
    first = tree(tmp_path / "out")
    curate(tmp_path, stages, sources, shard_bytes=1, workers=2, output=str(tmp_path / "again"))
    assert tree(tmp_path / "again") == first


def test_a_stage_of_some_sources(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        written(tmp_path, name, ["same text", "a@b.org"])
    sources = [{"name": each, "path": str(tmp_path / each)} for each in ("one", "two", "three")]
    stages = [{"pii": {}, "only": ["two"]}, {"exact": {}, "only": ["one", "three"]}]
    report = curate(tmp_path, stages, sources)
    assert kept(tmp_path / "out") == ["one/a.jsonl:1", "one/a.jsonl:2", "two/a.jsonl:1", "two/a.jsonl:2"]
    assert report["removed"] == {"02_exact": {"duplicate": {"three": 2}}}
    assert [each["text"] for each in lines(tmp_path / "out/documents")][1::2] == ["a@b.org", "email@example.com"]


def test_mistakes_of_sources_and_levels(tmp_path: Path) -> None:
    sources = [{"name": "one", "path": str(tmp_path)}]
    stages = [
        {"pii": {}, "only": ["none"]},
        {"escalate": [{"pii": {}}]},
        {"escalate": [{"exact": {}}, {"keep": {"signals": {"x": [0, 1]}}}]},
        {"escalate": {"pii": {}}},
        {"pii": {}, "exact": {}},
    ]
    with pytest.raises(ConfigError) as raised:
        recipe(tmp_path, stages, sources)
    assert [each.key for each in raised.value.problems] == [
        "stages.0.only",
        "stages.1.escalate",
        "stages.2.escalate.0",
        "stages.2.escalate.1.keep.signals.x",
        "stages.3.escalate",
        "stages.4",
    ]


def test_a_list_that_changes_is_not_the_same_run(tmp_path: Path) -> None:
    written(tmp_path, "in", ["one text", "another"])
    (tmp_path / "terms.txt").write_text("one")
    sources = [{"name": "s", "path": str(tmp_path / "in")}]
    stages = [
        {
            "escalate": [
                {"blocklist": {"file": str(tmp_path / "terms.txt")}},
                {"keep": {"signals": {"rps_doc_word_count": [9, 9]}}},
            ]
        }
    ]
    curate(tmp_path, stages, sources)
    curate(tmp_path, stages, sources)
    (tmp_path / "terms.txt").write_text("another")
    with pytest.raises(DataError, match="the files that stages read must be the same"):
        curate(tmp_path, stages, sources)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("http://bad.example/x", "bad.example"),
        ("https://sub.BAD.example:8080/", "bad.example"),
        ("http://notbad.example/", None),
        ("http://bad.example.org/", None),
        ("http://good.org/bad.example", None),
        ("http://user@bad.example./", "bad.example"),
        ("http://[broken", None),
        (7, None),
    ],
)
def test_domains(address: object, found: str | None, tmp_path: Path) -> None:
    (tmp_path / "domains.txt").write_text("bad.example\nother.net\n")
    kind = STAGES["domains"]
    work = kind.work(kind.options(file=str(tmp_path / "domains.txt")))
    gone = work(Document("text", "a", metadata={"record": {"url": address}}))
    assert (gone.detail if gone else None) == found


def test_c4_cuts_lines_and_keeps_the_rest() -> None:
    kind = STAGES["c4_quality"]
    good = [f"This is sentence number {each} of the page." for each in range(5)]
    document = Document(
        "\n".join(["Menu", good[0], "we use cookies on this page.", *good[1:], "No end of sentence here"]), "a"
    )
    assert kind.work(kind.options())(document) is None and document.text == "\n".join(good)
    few = Document("\n".join(good[:4]), "a")
    assert kind.work(kind.options())(few).reason == "too_few_sentences"
    assert kind.work(kind.options())(Document("\n".join([*good, "a { b } is code."]), "a")).reason == "curly_bracket"
    open_ended = Document("\n".join([*good, "No end of sentence here"]), "a")
    assert kind.work(kind.options(filter_no_terminal_punct=False))(open_ended) is None
    assert open_ended.text.endswith("No end of sentence here")


def test_decontamination_that_reports(tmp_path: Path) -> None:
    (tmp_path / "examples.txt").write_text("what is the capital of France")
    written(tmp_path, "in", ["They ask: what is the capital of France?", "Something else."])
    stages = [{"decontaminate": {"file": str(tmp_path / "examples.txt"), "n": 5, "action": "report"}}]
    report = curate(tmp_path, stages, [{"name": "s", "path": str(tmp_path / "in")}])
    assert report["noted"] == {"01_decontaminate": {"shares an n-gram with an example": {"s": 1}}}
    assert [each["metadata"].get("overlap") for each in lines(tmp_path / "out/documents")] == ["1", None]
