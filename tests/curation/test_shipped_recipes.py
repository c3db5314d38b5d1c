"""The recipes of configs/curation on real texts, Python's own documentation and code, with documents planted among them
that a stage must find."""

from __future__ import annotations

import pydoc_data.topics
import random
from pathlib import Path

import pytest

pytest.importorskip("datatrove")

from megatron.curation.recipe import read_recipe  # noqa: E402
from megatron.curation.run import run  # noqa: E402
from tests.curation.recipes import kept, lines, written  # noqa: E402
from tests.paths import ROOT  # noqa: E402

LISTS = ROOT / "configs" / "curation" / "lists"
TOPICS = [text for _, text in sorted(pydoc_data.topics.topics.items()) if 2000 < len(text) < 9000][:24]
PROSE = (LISTS / "prose.txt").read_text().strip().split("\n\n")
BOILERPLATE = (LISTS / "boilerplate.txt").read_text().strip().split("\n\n")


def cured(folder: Path, name: str, sources: dict[str, Path], **keys) -> tuple[dict, dict[str, str]]:
    """The report of a shipped recipe, and the stage that removed each document. Every document is accounted for."""
    given = [{"name": each, "path": str(path), **keys} for each, path in sources.items()]
    recipe = read_recipe(
        ROOT / "configs" / "curation" / f"{name}.yml", {"output": str(folder / "out"), "sources": given}
    )
    report = run(recipe, quiet=True)
    removed = {each["id"]: each["stage"] for each in lines(folder / "out" / "removed")}
    assert not report["quarantined"] and {*removed, *kept(folder / "out")} == {
        f"{source}/{file.name}:{number}"
        for source, path in sources.items()
        for file in path.iterdir()
        for number in range(1, file.read_text().count("\n") + 1)
    }
    assert not set(removed) & set(kept(folder / "out"))
    return report, removed


def changed(text: str) -> str:
    """A near-duplicate: one word in 200 is another one."""
    words, draw = text.split(" "), random.Random(3)
    for place in draw.sample(range(len(words)), max(len(words) // 200, 1)):
        words[place] = "otherwise"
    return " ".join(words)


def test_redpajama_v2(tmp_path: Path) -> None:
    body = "\n".join(PROSE)
    texts = [body, body, changed(body), "lorem ipsum " + TOPICS[2], "buy it now " * 60, *TOPICS]
    _, removed = cured(tmp_path, "redpajama_v2", {"web": written(tmp_path, "web", texts)})
    stages = [removed.get(f"web/a.jsonl:{number}") for number in range(1, 6)]
    assert stages == [None, "03_exact", "04_minhash", "02_keep", "02_keep"]
    documents = lines(tmp_path / "out/documents")
    assert len(documents) >= 4 and all(len(each["metadata"]["signals"]) > 20 for each in documents)


def test_redpajama_v1(tmp_path: Path) -> None:
    shared = "This paragraph stands at the end of several pages of the same site, and once is enough of it."
    pages = [
        *(f"{each}\n{shared}" for each in PROSE),
        *BOILERPLATE,
        shared,
        "Der Fluss ist nicht lang und die Stadt klein.",
    ]
    code = ["def add(one, other):\n    return one + other\n" * 3, "x = '" + "a" * 1200 + "'\n", "~!@#$%^&*()" * 20]
    (tmp_path / "github").mkdir()
    for number, each in enumerate(code):
        (tmp_path / "github" / f"{number}.py").write_text(each)
    books = [" ".join(TOPICS[:3]), changed(" ".join(TOPICS[:3])), TOPICS[4]]
    given = {
        "common_crawl": written(tmp_path, "common_crawl", pages),
        "github": tmp_path / "github",
        "books": written(tmp_path, "books", books),
    }
    sources = [{"name": name, "path": str(path)} for name, path in given.items()]
    recipe = read_recipe(
        ROOT / "configs/curation/redpajama_v1.yml", {"output": str(tmp_path / "out"), "sources": sources}
    )
    report = run(recipe, quiet=True)
    removed = {each["id"]: each["stage"] for each in lines(tmp_path / "out/removed")}
    page = {number: f"common_crawl/a.jsonl:{number}" for number in range(1, len(pages) + 1)}
    count = len(PROSE)
    assert [page[number] in removed for number in range(1, count + 1)] == [False] * count
    texts = {each["id"]: each["text"] for each in lines(tmp_path / "out/documents")}
    assert [shared in texts[page[number]] for number in range(1, count + 1)] == [True] + [False] * (count - 1)
    assert {removed[page[count + number]] for number in range(1, 9)} <= {"02_language", "03_classifier"}
    assert removed[page[count + 9]] == "01_lines" and removed[page[count + 10]] == "02_language"
    assert report["noted"]["01_lines"] == {"duplicate lines": {"common_crawl": count - 1}}
    assert removed["github/1.py"] == removed["github/2.py"] == "04_keep" and "github/0.py" in texts
    assert removed["books/a.jsonl:2"] == "06_minhash" and "books/a.jsonl:1" in texts


@pytest.mark.parametrize("name", ["zyda", "zyda2"])
def test_zyda_keeps_the_document_of_the_first_source(name: str, tmp_path: Path) -> None:
    low, high = ("c4", "pes2o") if name == "zyda" else ("dolma_cc", "fineweb_edu")
    pages = [changed(TOPICS[0]), changed(TOPICS[1]), TOPICS[2], "0123456789 " * 40, BOILERPLATE[0]]
    given = {low: written(tmp_path, low, pages), high: written(tmp_path, high, [TOPICS[0], TOPICS[1], TOPICS[3]])}
    _, removed = cured(tmp_path, name, given, text="text")
    stages = {"zyda": ("03_minhash", "01_keep"), "zyda2": ("02_minhash", "03_classifier")}[name]
    assert removed[f"{low}/a.jsonl:1"] == removed[f"{low}/a.jsonl:2"] == stages[0]
    assert {f"{high}/a.jsonl:{number}" for number in (1, 2, 3)} <= set(kept(tmp_path / "out"))
    assert removed[f"{low}/a.jsonl:{4 if name == 'zyda' else 5}"] == stages[1]


def test_deep_ignorance_reports_the_rates_of_both_levels(tmp_path: Path) -> None:
    special = (LISTS / "biology_specialist.txt").read_text().strip().split("\n\n")
    general = (LISTS / "biology_general.txt").read_text().strip().split("\n\n")
    spared = general[0] + " Pathogens differ in virulence. " + " ".join(general[1:])
    texts = [*special, *general, spared, "One term: virulence. " + general[1], *TOPICS[:5]]
    report, removed = cured(tmp_path, "deep_ignorance", {"dclm": written(tmp_path, "dclm", texts)})
    assert set(removed) == {f"dclm/a.jsonl:{number}" for number in range(1, 5)}
    assert report["noted"] == {"01_escalate": {"escalated, and kept by 02_classifier": {"dclm": 1}}}
    assert report["removed"]["01_escalate"] == {"proxy above 0.5": {"dclm": 4}}
    found = next(each for each in lines(tmp_path / "out/documents") if each["id"] == "dclm/a.jsonl:9")
    assert found["metadata"]["escalated"][0].startswith("01_blocklist: pathogens, virulence")
    page = (tmp_path / "out/report.html").read_text()
    assert "escalated, and kept by 02_classifier" in page and f"{100 / len(texts):.2f}</td>" in page


def test_fineweb(tmp_path: Path) -> None:
    body, german = "\n".join(PROSE[:5]), "Der Fluss ist nicht lang, und die Stadt ist klein."
    mail = "\n".join([*PROSE[5:], "Those who have a question about it should write to someone@example.org."])
    texts = [body, changed(body), "\n".join(BOILERPLATE), german, mail, *TOPICS[:6]]
    _, removed = cured(tmp_path, "fineweb", {"web": written(tmp_path, "web", texts)})
    assert removed["web/a.jsonl:2"] == "06_minhash" and removed["web/a.jsonl:4"] == "01_language"
    left = {each["id"]: each["text"] for each in lines(tmp_path / "out/documents")}
    assert "web/a.jsonl:3" in removed and left["web/a.jsonl:1"] == body
    assert left["web/a.jsonl:5"] == mail.replace("someone@example.org", "email@example.com")
