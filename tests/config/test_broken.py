"""Every broken configuration is refused by the real command, with all that the user needs to fix it."""

from __future__ import annotations

import inspect
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from megatron.config import rules, to_yaml
from megatron.config.kind import LayerKind, kinds_of
from megatron.config.problems import Problem
from megatron.config.resolution import combine
from megatron.config.rule_context import Check, RuleContext
from megatron.config.source.layers import ConfigSource
from tests.config.broken import BASE, BROKEN, WARNED, Case
from tests.data.make import write_documents
from tests.paths import ROOT
from tools.config import main


@cache
def teachers() -> dict[str, str]:
    """Metadata of checkpoints of models with another vocabulary and with an odd number of heads."""
    found = {}
    for name, vocabulary, heads in (("other_words", 96, 4), ("odd_heads", 128, 3)):
        model = {"layers": "(attention/mlp) x1", "hidden_size": 48, "vocab_size": vocabulary}
        source = ConfigSource({"model": {**model, "attention": {"heads": heads}}, "training": {"steps": 1}})
        training = {"sequence_length": 32, "micro_batch_size": 1, "global_batch_size": 1}
        text = to_yaml(combine([ConfigSource({"training": training}), source], ranks=1, check_inputs=False))
        found[name] = json.dumps({"step": 1, "config": text, "config_hash": sha256(text.encode()).hexdigest()})
    return found


def on_one_machine(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Work in a folder of a machine that is the same wherever the tests run."""
    patch.chdir(folder)
    patch.setattr("megatron.config.arithmetic.machine.has_gpu", lambda: False)
    patch.setattr("megatron.config.arithmetic.machine.memory_bytes", lambda: 64 << 30)
    patch.setattr("megatron.config.arithmetic.machine.free_bytes", lambda path: 100 << 30)
    patch.delenv("SLURM_JOB_ID", raising=False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with base.yml and the files that the cases name."""
    on_one_machine(tmp_path, monkeypatch)
    return fill(tmp_path)


def fill(folder: Path) -> Path:
    """Write base.yml and the files that the cases name."""
    (folder / "base.yml").write_text(BASE)
    (folder / "other.yml").write_text("extends: nothing.yml\n")
    (folder / "circle.yml").write_text("extends: circle.yml\n")
    for name in ("half.bin", "whole.bin", "whole.idx"):
        (folder / name).write_bytes(b"")
    write_documents(folder / "few", [list(range(64))] * 4)
    for step in (5, 20):
        (folder / "neox" / f"global_step{step}").mkdir(parents=True)
        (folder / "neox" / f"global_step{step}" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (folder / "neox" / "latest").write_text("global_step20")
    for name, text in teachers().items():
        (folder / name).mkdir()
        (folder / name / "meta.json").write_text(text)
    row = "{operation: all_reduce, hosts: 2, ranks: 4, choices: [[0, three_level]]}"
    for name, rows in (("machine", ""), ("three", row)):
        table = f"algorithms: {{ranks: 4, hosts: 2, backend: nccl, device: x, table: [{rows}]}}\n"
        (folder / f"{name}.yml").write_text(table)
    vocabulary = {f"t{index}": index for index in range(190)}
    added = [{"id": index, "content": f"<{index}>"} for index in range(190, 200)]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return folder


def command(folder, case: Case) -> list[str]:
    (folder / "a.yml").write_text(f"extends: base.yml\n{case.text}\n")
    return ["check", "--ranks", str(case.ranks), "a.yml", *case.arguments]


def test_the_base_is_sound(folder, capsys):
    assert main(["check", "--ranks", "2", "base.yml"]) == 0
    assert capsys.readouterr().err == ""


class Outcome(NamedTuple):
    """Exit status and output of `check` for a case, and the names of the rules that it breaks."""

    status: int
    out: str
    err: str
    fired: frozenset


class Watch:
    """Every case is checked once for all tests, and the rules that find something in it are noted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = fill(folder), {}
        self.every, self.fired = set(), set()
        self.tables = {name: tuple(map(self.watched, getattr(rules, name))) for name in ("RULES", "INPUT_RULES")}
        self.kinds = cache(self.watched_kinds)

    def watched(self, rule):
        name = rule if isinstance(rule, Check) else f"{rule.__module__}.{rule.__qualname__}"
        self.every.add(name)

        def run(context):
            for problem in rule(context):
                self.fired.add(name)
                yield problem

        return run

    def watched_kinds(self, extensions: tuple[str, ...]) -> dict[str, LayerKind]:
        def seen(kind: LayerKind) -> LayerKind:
            own, stack = tuple(map(self.watched, kind.rules)), tuple(map(self.watched, kind.stack_rules))
            return replace(kind, rules=own, stack_rules=stack)

        return {name: seen(kind) for name, kind in kinds_of(extensions).items()}

    def outcome(self, case: Case) -> Outcome:
        if case.name not in self.known:
            self.fired = set()
            out, err = io.StringIO(), io.StringIO()
            with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
                on_one_machine(self.folder, patch)
                for name, table in self.tables.items():
                    patch.setattr(rules, name, table)
                kinds = property(lambda context: self.kinds(tuple(context.config.model.extensions)))
                patch.setattr(RuleContext, "kinds", kinds)
                status = main(command(self.folder, case))
            self.known[case.name] = Outcome(status, out.getvalue(), err.getvalue(), frozenset(self.fired))
        return self.known[case.name]


@pytest.fixture(scope="module")
def watch(tmp_path_factory) -> Watch:
    return Watch(tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_refused(case, watch):
    message = watch.outcome(case)
    assert message.status == 2
    assert message.out == ""
    for fragment in case.says:
        assert fragment in message.err, message.err
    problems = re.split(r"\d+ warnings? in the configuration", message.err)[0]
    assert problems.count("    rule: ") == case.problems, message.err
    assert message.err.count("    fix:  ") == message.err.count("    rule: ")


@pytest.mark.parametrize("case", WARNED, ids=lambda case: case.name)
def test_warned(case, watch):
    message = watch.outcome(case)
    assert message.status == 0
    for fragment in case.says:
        assert fragment in message.err, message.err
    assert message.err.count("    rule: ") == 1 and "1 warning in the configuration" in message.err


def test_names_are_unique_and_many():
    names = [case.name for case in BROKEN + WARNED]
    assert len(set(names)) == len(names)
    assert len(BROKEN) >= 45


def kind_rules() -> dict[str, tuple]:
    """The rules of each kind of layer: those on one use, and those on the whole configuration."""
    return {name: (*kind.rules, *kind.stack_rules) for name, kind in kinds_of().items()}


def modules() -> list[ModuleType]:
    """Where rules are written."""
    return [*rules.MODULES, *{inspect.getmodule(rule) for found in kind_rules().values() for rule in found}]


def rule_functions() -> dict[str, object]:
    """Every rule that is written, found by its signature. Rules that a function makes are found where they are used."""
    written = {
        f"{module.__name__}.{name}": function
        for module in modules()
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and "<locals>" not in function.__qualname__
        and inspect.signature(function).return_annotation in (Iterator[Problem], "Iterator[Problem]")
    }
    return written


def test_every_rule_is_registered():
    registered = [rule for rule in (*rules.RULES, *rules.INPUT_RULES) if not isinstance(rule, Check)]
    registered += [rule for found in kind_rules().values() for rule in found if "<locals>" not in rule.__qualname__]
    names = {f"{rule.__module__}.{rule.__name__}" for rule in registered}
    assert names == {f"{each.__module__}.{each.__name__}" for each in rule_functions().values()}


@pytest.mark.parametrize("first", ["", "from __future__ import annotations"])
def test_rules_are_found_however_annotations_are_kept(first):
    """A module that imports annotations from __future__ keeps them as text. Its rules are called too."""
    module = ModuleType("added")
    imports = "from collections.abc import Iterator\nfrom megatron.config.problems import Problem"
    functions = "def rule(context) -> Iterator[Problem]: yield\ndef helper(context) -> bool: return True"
    exec(compile(f"{first}\n{imports}\n{functions}", "added.py", "exec", dont_inherit=True), vars(module))
    assert rules._written(module) == [module.rule]


def test_every_rule_has_a_case(watch):
    """Some case of the tables breaks each rule, and rules of kinds for each kind or one that shares the rule."""
    fired = set().union(*(watch.outcome(case).fired for case in BROKEN + WARNED))
    # Only a package that is missing breaks these (tests/config/rules/test_optimizer_packages.py, test_extras.py).
    names = ("recipe.packages_are_here", "output.packages_of_sinks_are_here")
    left = {f"megatron.config.rules.{name}" for name in names}
    # These ask transformers, which takes seconds (tests/kinds/transformers/test_whole_model.py).
    left |= {each for each in watch.every if str(each).startswith("megatron.kinds.transformers.")}
    assert watch.every - fired == left


def test_all_mistakes_at_once(folder, capsys):
    """A syntax mistake of one file, keys, types and rules of others are listed together."""
    (folder / "c.yml").write_text("zero:\n  stage: 2\n  stage: 1\n")
    case = Case("", "model: {atention: {heads: 4}}\ntraining: {steps: many}\nparallel: {pipeline: 2, tensor: 3}", ())
    assert main([*command(folder, case), "c.yml", "optimizer.lr=fast"]) == 2
    message = capsys.readouterr().err
    for fragment in (
        "c.yml:3: zero.stage",
        "a.yml:2: model.atention",
        "a.yml:3: training.steps = 'many'",
        "argument optimizer.lr=fast",
        "parallel.tensor = 3 (a.yml:4)",
        "base.yml:5: model.attention.heads = 4",
    ):
        assert fragment in message, message


@pytest.mark.parametrize(
    "case", [BROKEN[0], next(case for case in BROKEN if case.name == "tab")], ids=lambda case: case.name
)
def test_in_its_own_process(case, folder):
    """The real command: status 2, the message on standard error, and torch is never imported."""
    script = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT / "tools" / "config.py"), *command(folder, case)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert all(fragment in done.stderr for fragment in case.says)


def test_json_is_one_document(folder, capsys):
    case = Case("", "zero: {stage: 7}\nparallel: {tensor: 8}", ())
    assert main([*command(folder, case), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert [each["key"] for each in found["problems"]] == ["zero.stage", "parallel.tensor", "model.attention.heads"]
    assert found["problems"][0]["value"] == 7 and found["problems"][0]["where"] == "a.yml:2"
