"""Text that is meant to cost time or depth is refused at once, with a sentence and status 2."""

from __future__ import annotations

import pytest

from megatron.config import ConfigError, load
from megatron.config.source import structure
from megatron.config.source.structure import nearest_key
from tests.config.test_merge import BASE_TEXT
from tools.config import main

LEVELS = 12


def bomb() -> str:
    """Lists of nine aliases of the list before: 9 ** 12 values in 600 bytes."""
    lists = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, LEVELS)]
    return "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x]", *lists]) + "\n"


def doubled(folder) -> str:
    """Files that extend the next one twice: 2 ** 30 files in 31."""
    for number in range(30):
        (folder / f"f{number}.yml").write_text(f"extends: [f{number + 1}.yml, f{number + 1}.yml]\n")
    (folder / "f30.yml").write_text(BASE_TEXT)
    return "extends: f0.yml\n"


TEXTS = {
    "aliases of aliases": (lambda _: bomb(), "at most 20,000 values"),
    "brackets": (lambda _: "a: " + "[" * 5000 + "]" * 5000, "nested at most 64 deep"),
    "open brackets": (lambda _: "a: " + "[" * 5000, "nested at most 64 deep"),
    "indentation": (lambda _: "\n".join(" " * n + "a:" for n in range(3000)), "nested at most 64 deep"),
    "many keys": (lambda _: "model:\n" + "".join(f"  a{n}: 1\n" for n in range(50_000)), "at most 20,000 values"),
    "many bytes": (lambda _: "a: " + "x" * (9 << 20), "text of at most 8 MiB"),
    "files of files": (doubled, "extends at most 40 files"),
    "hexadecimal digits": (lambda _: "training: {steps: 0x" + "f" * 9000 + "}", "at most 60 digits"),
    "digits": (lambda _: "training: {steps: " + "9" * 9000 + "}", "at most 60 digits"),
    "groups of layers": (lambda _: "model: {layers: " + "(" * 5000 + "}", "groups are nested at most 32 deep"),
    "layers": (lambda _: "model: {layers: (attention/mlp) x" + "9" * 9000 + "}", "more than 100000 blocks"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_limit_is_what_refuses(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, says = TEXTS[name]
    (tmp_path / "base.yml").write_text(BASE_TEXT)
    (tmp_path / "a.yml").write_text(text(tmp_path))
    assert main(["check", "base.yml", "a.yml"]) == 2
    message = capsys.readouterr().err
    assert says in message and "fix:" in message and max(map(len, message.splitlines())) < 400


@pytest.mark.parametrize(
    "argument", ["model.layers=" + "[" * 9000, ".".join("a" * 9000) + "=1", "data.train." + "9" * 9000 + ".path=x"]
)
def test_overrides_have_the_same_limits(argument, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yml").write_text(BASE_TEXT)
    assert main(["check", "base.yml", argument]) == 2
    assert "rule:" in capsys.readouterr().err


def test_what_a_large_run_needs_is_allowed(tmp_path, monkeypatch):
    """Two thousand sources with weights and label files, and a file that five others extend."""
    monkeypatch.chdir(tmp_path)
    sources = "".join(f"    - {{path: corpus/part_{n}, weight: {n}.5, labels: l{n}}}\n" for n in range(2000))
    (tmp_path / "base.yml").write_text(BASE_TEXT)
    (tmp_path / "a.yml").write_text(f"extends: [{', '.join(['base.yml'] * 5)}]\ndata:\n  train:\n{sources}")
    assert main(["show", "a.yml", "data.synthetic=none"]) == 0


def test_near_names_of_thousands_of_unknown_keys_are_not_looked_for(tmp_path, monkeypatch):
    """Each takes milliseconds: of 3,000 keys it took seven seconds."""
    (tmp_path / "many.yml").write_text("model:\n" + "".join(f"  some_key_{n}: 3\n" for n in range(3000)))
    searched = []
    monkeypatch.setattr(structure, "nearest_key", lambda path: searched.append(path) or nearest_key(path))
    with pytest.raises(ConfigError) as caught:
        load([str(tmp_path / "many.yml")], [], ranks=1, check_inputs=False)
    assert 0 < len(searched) <= 100  # of 3,000
    unknown = [each for each in caught.value.problems if "unknown key" in each.rule]
    assert len(unknown) == 3000 and "the keys there are" in unknown[0].fix
