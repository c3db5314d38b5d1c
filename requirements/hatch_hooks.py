"""Two hooks of the build: what the package depends on, and what goes into a wheel besides `megatron/`.

requirements/*.txt are the one place where dependencies are named. They pin the versions that the tests ran with, which
is what an environment of one's own wants. A library that is installed beside others must not pin: the wheel asks for
the same packages from the tested version up to the next one that may break by the package's own numbering.

    name==X.Y.Z     ->  name>=X.Y,<X+1
    name==0.Y.Z     ->  name>=0.Y.Z,<0.Y+1       a minor version may break what is not at 1.0 yet
    name==2026.9.0  ->  name>=2026.9             calendar versions promise nothing
    # name: tested from X.V to X.W  (a line of base.txt) replaces this: name>=X.V,<X.W+1

Each file besides base.txt is an extra of its name: `pip install "deepy[data]"`.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

BUNDLE = "megatron/_bundle"  # megatron/installation.py finds it
FOLDERS = ("tools", "configs")
TESTED = re.compile(r"^# ([\w.-]+): tested from (\d+\.\d+) to (\d+)\.(\d+)", re.MULTILINE)
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?P<extras>\[[\w,-]+\])?==(?P<version>[\w.]+)(?P<marker>\s*;[^#]+)?")


def widened(pin: str) -> str:
    """A requirement for a library from a line `name==version`.

    Raises:
        ValueError: the line is no pin.
    """
    match = PIN.fullmatch(pin)
    if match is None:
        raise ValueError(f"requirements: expected name==version, found {pin!r}")
    major, minor, *_ = [*match["version"].split("."), "0"]
    if int(major) >= 2000:
        versions = f">={major}.{minor}"
    elif int(major) == 0:
        versions = f">={match['version']},<0.{int(minor) + 1}"
    else:
        versions = f">={major}.{minor},<{int(major) + 1}"
    return f"{match['name']}{match['extras'] or ''}{versions}{(match['marker'] or '').rstrip()}"


def pins(path: Path) -> list[str]:
    """The lines of a requirements file that name packages, and those of the files that it includes besides base.txt."""
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in path.read_text(encoding="utf-8").splitlines()]
    others = [line.removeprefix("-r ") for line in lines if line.startswith("-r ") and line != "-r base.txt"]
    own = [line for line in lines if line and not line.startswith("-r ")]
    return list(dict.fromkeys([*(pin for name in others for pin in pins(path.with_name(name))), *own]))


class Metadata(MetadataHookInterface):
    """Dependencies and extras, from requirements/*.txt."""

    def update(self, metadata: dict) -> None:
        folder = Path(self.root, "requirements")
        found = TESTED.findall(Path(folder, "base.txt").read_text(encoding="utf-8"))
        tested = {name: f"{name}>={first},<{major}.{int(minor) + 1}" for name, first, major, minor in found}
        asked = [(pin.partition("==")[0], widened(pin)) for pin in pins(folder / "base.txt")]
        metadata["dependencies"] = [tested.get(name, text) for name, text in asked]
        metadata["optional-dependencies"] = {
            path.stem: [widened(pin) for pin in pins(path)]
            for path in sorted(folder.glob("*.txt"))
            if path.stem != "base"
        }


class Bundle(BuildHookInterface):
    """The scripts, tools and configurations, beside the package's code."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":  # the checkout has them
            return
        root = Path(self.root)
        names = [*(path.name for path in root.glob("*.py")), *(name for name in FOLDERS if (root / name).is_dir())]
        build_data["force_include"].update({str(root / name): f"{BUNDLE}/{name}" for name in names})
