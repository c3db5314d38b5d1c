"""Who imports whom: rooms only those above them in docs/architecture.md's table, and no two files each other.

Imports inside functions count like those at the top of a file, since they too need the other file in order to run.
Imports under TYPE_CHECKING do not: annotations are never evaluated, and two classes may well speak of each other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from megatron.config.registry import KIND, registry_of
from tests.paths import ROOT

PACKAGE = "megatron"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below `node`, without the ones that only a type checker reads."""
    below = [node]
    while below:
        for child in ast.iter_child_nodes(below.pop()):
            if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
                yield child
                below.append(child)


def imported(name: str, files: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports anywhere in its file."""
    path, found = files[name], set()
    parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in executed(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in files else base for alias in node.names}
    return (found & files.keys()) - {name}


@cache
def imports() -> dict[str, set[str]]:
    """The imports of each module."""
    return {name: imported(name, FILES) for name in FILES}


def room_of(module: str) -> str | None:
    """The folder of a module. None for the files that stand next to the rooms and know none of them."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / PACKAGE / parts[1]).is_dir() else None


def rooms() -> list[str]:
    """The rooms in the order of the manual's table."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)


def test_every_room_is_in_the_table():
    assert sorted(rooms()) == sorted({room_of(name) for name in FILES} - {None})


def test_rooms_import_only_rooms_above_them():
    order = {None: -1, **{room: place for place, room in enumerate(rooms())}}
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if order[room_of(other)] > order[room_of(name)]
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_circles_between_files():
    try:
        tuple(TopologicalSorter(imports()).static_order())
    except CycleError as error:
        raise AssertionError("imports go in a circle: " + " <- ".join(error.args[1])) from None


def sub_room_of(module: str) -> str:
    """The sub-folder of a room that has the module. For a file directly in its room, the module."""
    parts = module.split(".")
    return ".".join(parts[:3]) if len(parts) > 3 else module


def test_sub_rooms_import_each_other_in_no_circle():
    graph: dict[str, set[str]] = {}
    for name, others in imports().items():
        inside = {sub_room_of(other) for other in others if FILES[other].name != "__init__.py"}
        graph.setdefault(sub_room_of(name), set()).update(inside - {sub_room_of(name)})
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError("sub-folders import in a circle: " + " <- ".join(error.args[1])) from None


def test_no_folder_has_more_than_25_files():
    rooms = [ROOT / name for name in (PACKAGE, "bench", "tools", "eval_tasks", "tests")]
    folders = [*rooms, *(each for room in rooms for each in room.rglob("*") if each.is_dir())]
    sizes = {folder: len([*folder.glob("*.py")]) for folder in folders}
    assert not {str(folder): size for folder, size in sizes.items() if size > 25}


def test_one_file_knows_deepspeeds_entry_and_one_room_its_names():
    """`deepspeed` is imported only in engine/, and initialised in one place there."""
    importers, callers = set(), []
    for name, path in FILES.items():
        for node in executed(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(each.split(".")[0] == "deepspeed" for each in names):
                importers.add(room_of(name))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "deepspeed.initialize":
                callers.append(name)
    assert importers == {"engine"} and len(callers) == 1


# Files outside `kinds/` that speak of single kinds, or import them, and why.
ABOUT_KINDS = {
    "megatron.config.registry": "the table of kinds",
    "megatron.config.neox": "GPT-NeoX's keys and names of layers, in our options",
    "megatron.checkpoint.hf.architectures": "which kinds a Hugging Face architecture has, and its names for them",
    "megatron.checkpoint.hf.rwkv_files": "the published files of single kinds",
    "megatron.checkpoint.hf.layer_types": "rotary options and windows are attention's where nothing else is said",
    "megatron.checkpoint.hf.companions": "transformers' word for a type of layers, which is also ours",
    "megatron.checkpoint.hf.export": "the package transformers, whose name a kind has",
    "megatron.checkpoint.format.manifest": "the package transformers, whose name a kind has",
    "megatron.command.verbs": "a folder of tools",
    "megatron.curation": "that package",
    "megatron.engine.deepspeed.expert_groups": "DeepSpeed's word for optimizer groups of experts",
    "megatron.engine.optimizers.groups": "DeepSpeed's word for optimizer groups of experts",
    "megatron.engine.parts.expert_load": "the name of a record in metrics.jsonl",
    "megatron.extras": "that package",
    "megatron.launch.doctor": "that package",
    "megatron.plan.time_bands": "a band of a run's time has a kind's name",
    "megatron.plan.scaling": "which kinds can be made wider and deeper, and how their widths follow",
    "megatron.plan.score": "published runs are of dense transformers; a share of a device's peak has a kind's name",
    "megatron.report": "the name of that record",
    "megatron.training.hooks.experts": "the name of that record",
}


def speaks_of_kinds(name: str) -> list[str]:
    """Where a module has the name of a kind as a whole string, and which kinds it imports."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    kinds = set(registry_of().names(KIND))
    told = [
        f"{name}:{node.lineno} names {node.value!r}"
        for node in executed(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in kinds
    ]
    rooms = (f"{PACKAGE}.kinds.", f"{PACKAGE}.kinds.common.")
    taken = [f"{name} imports {other}" for other in imports()[name] if other.startswith(rooms[0])]
    return told + [each for each in taken if rooms[1] not in each]


def test_nobody_outside_names_or_imports_a_kind():
    """A kind declares its properties itself: in its `LayerKind`, or by a class that its layer has."""
    inside = f"{PACKAGE}.kinds"
    wrong = [
        each
        for name in FILES
        if not name.startswith(inside) and not name.startswith(tuple(ABOUT_KINDS))
        for each in speaks_of_kinds(name)
    ]
    assert not wrong, "\n".join(sorted(wrong))
    for exception in ABOUT_KINDS:
        assert any(speaks_of_kinds(name) for name in FILES if name.startswith(exception)), exception


def test_the_check_sees_circles_and_function_level_imports(tmp_path):
    """A check of the tests above, on two files. One imports the other inside a function."""
    files = {}
    for name, text in {
        "m.a": "def f():\n    from . import b",
        "m.b": "from m.a import f",
        "m.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from m.b import f",
    }.items():
        files[name] = tmp_path / f"{name[2:]}.py"
        files[name].write_text(text)
    assert {name: imported(name, files) for name in files} == {"m.a": {"m.b"}, "m.b": {"m.a"}, "m.c": set()}


def test_test_files_of_one_name_are_in_packages():
    """Pytest imports a file of a folder without __init__.py by its bare name, so a second one cannot be collected."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    names = [path.name for path in files]
    assert sorted(names) == sorted(set(names))
