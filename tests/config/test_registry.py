"""Names and import paths: what is inside loads, what is wrong with an extension is said with a rule and a fix."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.config import ConfigError, registry, resolve
from megatron.config.registry import INSIDE, KIND, RegistryError, load, registry_of
from megatron.config.schema import catalog
from megatron.config.source.extensions import PLACES


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a new name, and gives the name."""
    monkeypatch.syspath_prepend(tmp_path)
    written = iter(range(100))

    def write(text: str) -> str:
        name = f"guest_{tmp_path.name.replace('-', '_')}_{next(written)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.mark.parametrize("role, name", [(role, name) for role, table in INSIDE.items() for name in table])
def test_everything_inside_loads(role, name):
    assert registry_of().load(role, name) is load(INSIDE[role][name])


def test_the_table_imports_nothing():
    program = "import sys, megatron.config.registry as r; r.registry_of().names('kind'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_an_extension_adds_names_behind_those_inside(module):
    guest = module("EXTENSION = {'optimizer': {'mine': 'math:sqrt'}, 'kind': {'retention': 'math:pi'}}")
    names = registry_of((guest,)).names(KIND)
    assert names == (*INSIDE[KIND], "retention")
    assert registry_of((guest,)).load("optimizer", "mine")(4) == 2
    assert registry_of((guest,)).extensions == (guest,)
    assert "retention" not in registry_of().names(KIND)


def test_a_name_with_a_colon_is_an_import_path():
    assert registry_of().load("hook", "collections.abc:Mapping").__name__ == "Mapping"


@pytest.mark.parametrize(
    "text, rule, fix",
    [
        (None, "must be found by Python", "PYTHONPATH"),
        ("import nowhere_at_all", "needs nowhere_at_all", "install that"),
        ("1 / 0", "fails with ZeroDivisionError: division by zero", "fix it"),
        ("x = 1", "must have a mapping EXTENSION", "EXTENSION = {"),
        ("EXTENSION = {'mixer': {}}", "unknown role 'mixer'", "kind, "),
        ("EXTENSION = {'kind': ['a']}", "must map names to import paths", "fix it"),
        ("EXTENSION = {'kind': {'a': 'os.system'}}", "must give a plain name an import path", "package.module:"),
        ("EXTENSION = {'kind': {'a/b': 'a:b'}}", "must give a plain name an import path", "package.module:"),
        ("EXTENSION = {'kind': {'mlp': 'a:b'}}", "must not name its kind 'mlp', which stands for megatron", "another"),
    ],
)
def test_what_is_wrong_with_an_extension_is_said(module, text, rule, fix):
    with pytest.raises(RegistryError) as error:
        registry_of(("nowhere.to_be.found" if text is None else module(text),))
    assert rule in error.value.rule and fix in error.value.fix


def test_folders_without_an_init_are_found(tmp_path, monkeypatch):
    """Nested ones too: Python's own search wants the outer folder imported."""
    from megatron.config.parts import check_importable

    (tmp_path / "our_lab" / "probes").mkdir(parents=True)
    (tmp_path / "our_lab" / "probes" / "first.py").write_text("class Probe: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_importable("our_lab.probes.first:Probe")
    with pytest.raises(RegistryError, match="must define Other"):
        check_importable("our_lab.probes.first:Other")
    with pytest.raises(RegistryError, match="must be found by Python"):
        check_importable("our_lab.probes.second:Probe")


@pytest.mark.parametrize("path", ["os", "os:", "os.path:join:x", "../a:b", "os:path.join", "a b:c"])
def test_a_path_is_a_module_and_an_attribute(path):
    with pytest.raises(RegistryError, match="must be an import path"):
        load(path)


def test_an_attribute_that_is_not_there():
    with pytest.raises(RegistryError, match="module math must have nothing_such"):
        load("math:nothing_such")


def test_an_unknown_name_has_a_near_one():
    with pytest.raises(RegistryError, match="did you mean mamba2"):
        registry_of().load(KIND, "manba2")


def test_installed_packages_offer_names(tmp_path, monkeypatch):
    info = tmp_path / "guest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deepy.kind]\nretention = my_lab.retnet\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.offered_by(KIND, "retention") == "my_lab.retnet"
    assert registry.offered_by(KIND, "retnet") is None and registry.offered_by("optimizer", "retention") is None


NAMED = {  # role -> a configuration that has a name of it
    "optimizer": {"optimizer": {"type": "guests"}},
    "schedule": {"schedule": {"type": "guests"}},
    "objective": {"objective": {"type": "guests"}},
    "source": {"data": {"synthetic": "guests"}},
    "hook": {"hooks": ["guests"]},
    "metric": {"logging": {"sinks": [{"type": "guests"}]}},
    "runner": {"launch": {"runner": "guests"}},
    "scorer": {"peers": {"scorer": "guests"}},
}


@pytest.mark.parametrize("role", NAMED)
def test_installed_packages_offer_names_of_every_role(role, module, tmp_path, monkeypatch):
    """The package is found by the name that the configuration has, and its module is then listed."""
    path = module("from megatron.launch.runner import Runner\n\nthing = Runner(lambda job, launch: [])\n")
    guest = module(f"EXTENSION = {{'{role}': {{'guests': '{path}:thing'}}}}")
    info = tmp_path / "guest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[deepy.{role}]\nguests = {guest}\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = {"layers": "attention/mlp", "hidden_size": 8, "vocab_size": 8, "attention": {"heads": 1}}
    config = resolve({"model": model, "training": {"steps": 1, "sequence_length": 8}, **NAMED[role]})
    assert tuple(config.model.extensions) == (guest,)


def test_installed_packages_are_asked_for_unknown_names_only(monkeypatch):
    """To ask them is most of what reading a configuration costs, and how often a layer comes is no name."""
    asked = []
    monkeypatch.setattr("megatron.config.source.extensions.offered_by", lambda role, name: asked.append((role, name)))
    training = {"steps": 1, "sequence_length": 8}
    model = {"hidden_size": 8, "vocab_size": 8, "attention": {"heads": 1}}
    resolve({"model": {**model, "layers": "(attention/mlp) x2 attention/mlp x 3"}, "training": training})
    assert asked == []
    with pytest.raises(ConfigError):
        resolve({"model": {**model, "layers": "attention/x2y x2"}, "training": training})
    assert asked == [(KIND, "x2y")]


def test_every_key_that_is_a_name_is_looked_up_in_installed_packages():
    keys = {(key.limits["role"], key.name) for key in catalog().values() if "role" in key.limits}
    ends = {role: ".*.type" if role in ("hook", "metric") else "" for role, _ in PLACES}
    sections = {key.name.partition(".")[0] for key in catalog().values()}  # without that of a feature that was removed
    places = [(role, path) for role, path in PLACES if role != KIND and path[0] in sections]
    assert keys == {(role, ".".join(path) + ends[role]) for role, path in places}
    assert {role for role, given in NAMED.items() if given.keys() <= sections} == {role for role, _ in keys}
