"""docs/style.md, measured: no area has more house words, long sentences or semicolons than tests/style.json allows."""

from __future__ import annotations

import pytest

from tests.paths import ROOT
from tests.style import COUNTS, HOUSE_WORDS, Area, budget, measure, python, sentences


@pytest.fixture(scope="module")
def areas():
    return measure()


def test_no_area_exceeds_its_budget(areas):
    allowed = budget()
    over = [
        f"{name}: {area.counts[kind]} {kind}, at most {most}"
        for name, area in areas.items()
        for kind in COUNTS
        if area.counts[kind] > (most := allowed.get(name, {}).get(kind, 0))
    ]
    assert not over, "\n".join([*over, "`python -m tests.style AREA` lists them; docs/style.md has the rules"])


def test_the_budget_names_areas_that_exist(areas):
    assert set(budget()) <= set(areas)


def test_the_page_lists_every_house_word():
    page = (ROOT / "docs" / "style.md").read_text(encoding="utf-8")
    for term in HOUSE_WORDS.values():
        assert term in page, term


@pytest.mark.parametrize(
    ("text", "words", "long", "semicolons"),
    [
        ("Rank 0 writes the index. The others wait for it.", 0, 0, 0),
        ("Rank 0 alone tells nobody about it; the others go on.", 4, 0, 1),
        ("A step whose loss is not finite is left out of it, and `tell; told` is code.", 1, 0, 0),
        ("What a rank sends. What does it send?", 1, 0, 0),
        ("One " + "word " * 31 + "ends.", 0, 1, 0),
    ],
)
def test_counts(text, words, long, semicolons):
    area = Area()
    for sentence in sentences(text):
        area.add("here", sentence)
    assert area.counts == {"words": words, "long": long, "semicolons": semicolons}


def test_python_has_three_areas(tmp_path):
    (tmp_path / "a.py").write_text(
        '"""What this module tells."""\n\nx = f"a rank alone wrote {1}"  # nobody reads\n# but it goes\n# on\n'
    )
    areas = {f"a {part}": Area() for part in ("docstrings", "messages", "comments")}
    python(areas, "a", tmp_path / "a.py")
    assert [area.counts["words"] for area in areas.values()] == [2, 1, 2]


def test_an_entry_that_ends_with_a_full_stop_is_a_sentence():
    text = "Returns it.\n\nArgs:\n    path: of a file.\n    world, rank: of a run. Both count from 0.\n"
    assert list(filter(None, sentences(text)))[1:] == [
        "Args: path: of a file.",
        "world, rank: of a run.",
        "Both count from 0.",
    ]


def test_markdown_is_split_into_sentences_items_and_cells():
    text = (
        "# Title of it\n\nOne, e.g. this. Two\nlines.\n- item\n1. next\n\n| a | b c |\n|---|---|\n```sh\nrun; it\n```\n"
    )
    found = [sentence for sentence in sentences(text) if sentence.strip("-")]
    assert found == ["Title of it", "One, e.g this.", "Two lines.", "item", "next", "a", "b c"]
