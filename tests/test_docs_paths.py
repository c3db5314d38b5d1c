"""Every file that the documentation names exists, and its lines fit into an editor."""

from __future__ import annotations

import re

import pytest

from tests.paths import ROOT

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "eval_tasks/README.md",
    "examples/plugin/README.md",
    "examples/optimizers/README.md",
]
PAGES += sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))

# `folder/file.py` in backquotes or as a link's text, seen from the repository, from `megatron/` or from the page.
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|yml|md))`")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    folders = (ROOT, ROOT / "megatron", (ROOT / page).parent)
    named = set(NAMED.findall((ROOT / page).read_text(encoding="utf-8")))
    missing = sorted(name for name in named if not any((folder / name).exists() for folder in folders))
    assert not missing, f"{page} names files that do not exist: {', '.join(missing)}"


def test_the_pages_name_files():
    assert NAMED.findall((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_lines_of_at_most_120_characters(page):
    """Tables and code have the length that they need."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith("|")]
    assert not [line for line in long if not line.startswith("    ")]


def test_the_page_of_common_keys_names_keys():
    reference = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/configuration/*.md"))
    keys = re.findall(r"^\| (`[\w.]+`) \|", (ROOT / "docs/keys.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(keys) == 40
    assert not [key for key in keys if f"\n| {key} |" not in reference]
