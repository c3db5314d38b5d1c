"""Whether an import path can be imported, found out without running anything of it: it may need torch."""

from __future__ import annotations

import ast
from importlib.machinery import PathFinder
from pathlib import Path

from ..registry import PATH, RegistryError


def check_importable(path: str) -> None:
    """See that "package.module:name" is there, as far as one can without importing it.

    Raises:
        RegistryError: it is no import path, Python finds no such module, or the module's file does not define the name.
    """
    if not PATH.fullmatch(path):
        raise RegistryError(f"{path!r} must be an import path", "write it as package.module:name")
    module, _, name = path.partition(":")
    file = _file_of(module)
    if file is None or file.suffix != ".py":
        return  # built in, compiled, or without a file: only an import would show
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise RegistryError(f"{file} must be a Python file, and it is not: {error}", "fix it") from None
    names = _defined(tree)
    if name not in names and "*" not in names:
        raise RegistryError(f"{file} must define {name}, and it does not", f"define {name} there, or fix the path")


def _file_of(module: str) -> Path | None:
    search: list[str] | None = None
    file, parts = None, module.split(".")
    for part in parts:
        found = PathFinder.find_spec(part, search)  # with its whole name Python would want the parents imported
        if found is None:
            raise RegistryError(
                f"module {module} must be found by Python",
                "install the package that has it, or put its folder into PYTHONPATH, on every host",
            )
        search = list(found.submodule_search_locations or ())
        file = Path(found.origin) if found.origin and found.has_location else None
    return file


def _defined(tree: ast.Module) -> set[str]:
    """All names that a module may define. "*" where it imports all names of another."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return found | ({"*"} if "__getattr__" in found else set())
