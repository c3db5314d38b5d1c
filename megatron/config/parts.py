"""Names of user packages in a configuration: what they add to a run, and whether an import path can be imported."""

import ast
import inspect
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .problems import UserError
from .registry import PATH, RegistryError, registry_of
from .schema import Config
from .section import Addition


def resolve_import(config: Config, key: str, role: str, name: str) -> Any:
    """The object behind a name, or an import path, in this run.

    Raises:
        UserError: it cannot be imported. The message names the key.
    """
    try:
        return registry_of(tuple(config.model.extensions)).load(role, name)
    except RegistryError as error:
        raise UserError(f"{key} = {name!r}: {error.rule}\n    fix: {error.fix}") from error


def build_added(config: Config, key: str, role: str, entries: Sequence[Any], *args: Any, kind: type) -> list[Any]:
    """Each entry's class, made with `args` and with its options as keyword arguments.

    Args:
        key: where the entries stand in the configuration.
        kind: the class of each instance. Methods of a protocol must be there.

    Raises:
        UserError: one cannot be imported, does not take its options, or is something else.
    """
    made = []
    for index, entry in enumerate(entries):
        where = f"{key}.{index}.type"
        what = resolve_import(config, where, role, entry.type)
        try:
            inspect.signature(what).bind(*args, **_options(entry))
        except TypeError as error:
            raise UserError(f"{key}.{index}.options do not suit {entry.type}: {error}") from error
        thing = what(*args, **_options(entry))
        if not isinstance(thing, kind):
            raise UserError(f"{where} = {entry.type!r} must make a {kind.__module__}.{kind.__name__}, not {thing!r}")
        made.append(thing)
    return made


def _options(entry: Addition) -> dict[str, Any]:
    return {str(name): value for name, value in entry.options.items()}


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
