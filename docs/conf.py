"""The documentation as a site: `make site`. Pages are the Markdown files of docs/ and of the repository's root."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import __version__
from megatron.command.main import overview

os.environ["COLUMNS"] = "110"
GENERATED = Path(__file__).with_name("_generated")  # not tracked
GENERATED.mkdir(exist_ok=True)
(GENERATED / "commands.txt").write_text(overview() + "\n", encoding="utf-8")

project = "deepy"
author = copyright = "The deepy authors"
version = release = __version__

root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/configuration/*.md",
    "docs/*.ipynb",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]

myst_heading_anchors = 4  # what a link's #fragment may name, spelled as GitHub spells it
nb_execution_mode = "off"  # the notebook's outputs are stored; tests/test_site.py executes it
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "code"  # single backticks of docstrings
highlight_language = "none"  # of blocks that name no language
napoleon_use_ivar = True
pygments_style, pygments_dark_style = "friendly", "monokai"

html_theme = "furo"
html_title = f"deepy {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False


def _front_page(app, error) -> None:
    """Have the site's address lead to the first page."""
    if error is None:
        link = '<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">deepy</a>'
        Path(app.outdir, "index.html").write_text(f"<!doctype html>{link}", encoding="utf-8")


def setup(app) -> None:
    app.connect("build-finished", _front_page)
