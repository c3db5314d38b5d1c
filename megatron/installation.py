"""Where scripts, tools and configurations are, in a checkout and in an installed package. A digest of the code."""

import difflib
import hashlib
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
BUNDLE = "_bundle"  # made by requirements/hatch_hooks.py when a wheel is built
SUFFIXES = (".yml", ".yaml", ".json")


def root() -> Path:
    """The folder that holds `deepy.py`, `train.py`, `tools/` and `configs/`: the repository, or the wheel's copy."""
    bundle = PACKAGE / BUNDLE
    return bundle if bundle.is_dir() else PACKAGE.parent


def installed() -> bool:
    """Whether this package came from a wheel, and not from a checkout."""
    return root() != PACKAGE.parent


def run_apart(module: str, text: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """A module of this package, as a program that reads `text`, in another process that sees no GPU."""
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", module],
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )


def configuration_file(word: str) -> str | None:
    """The path of the configuration that a word on a command line means, or None.

    In this order: a file of that path, a file of that path and `.yml`, or a ready configuration of `configs/`, such as
    `pythia/70m`, `pythia/70m.yml` or `configs/pythia/70m.yml`. A user's file comes before a shipped one.
    """
    named = _with_suffix(Path(word))
    if named is not None:
        return str(named) if named.suffix in SUFFIXES else None
    if Path(word).is_absolute() or ".." in Path(word).parts:
        return None
    shipped = root() / "configs"
    found = _with_suffix(shipped / word.removeprefix("configs/"))
    return _short(found) if found is not None and found.suffix in SUFFIXES else None


def configuration_names() -> list[str]:
    """The names of all ready configurations, as `configuration_file` understands them: `pythia/70m`."""
    folder = root() / "configs"
    names = (path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yml"))
    return sorted(name for name in names if not name.startswith("curation/"))  # recipes of `deepy data curate`


def near_names(word: str, most: int = 4) -> list[str]:
    """Ready configurations that a word may mean: names that contain it, or else names that resemble it."""
    names, wanted = configuration_names(), word.lower().removesuffix(".yml").removeprefix("configs/")
    inside = [name for name in names if wanted and wanted in name and not name.startswith(("test/", "layouts/"))]
    return inside[:most] or difflib.get_close_matches(wanted, names, n=1)


def _with_suffix(path: Path) -> Path | None:
    candidates = [path, path.with_name(f"{path.name}.yml")] if path.name else []
    return next((each for each in candidates if each.is_file()), None)


def _short(path: Path) -> str:
    """A path as one would type it from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


@lru_cache(maxsize=1)
def code_version() -> str:
    """SHA-256 of every Python file of the package and of the scripts next to it, at the time of the first call."""
    return code_now()


def code_now() -> str:
    """SHA-256 of every Python file of the package and of the scripts next to it, with names."""
    digest, top = hashlib.sha256(), root()
    named = {path.name: path for path in top.glob("*.py")}
    named |= {path.relative_to(PACKAGE.parent).as_posix(): path for path in PACKAGE.rglob("*.py")}
    for name, path in sorted(named.items()):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
