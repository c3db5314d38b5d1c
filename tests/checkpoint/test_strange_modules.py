"""A checkpoint of a stranger that names modules: no command imports them before the user has admitted them."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.paths import ROOT
from tests.scripts import forked

MODULES = ("evil_module", "evil_optimizer", "evil_hook", "evil_runner")
EVIL = """
import os, pathlib
pathlib.Path(os.environ["MARKER"], __name__).touch()
EXTENSION = {}
class Thing: pass
THING = RUNNER = Thing
"""
# The stranger's own program: a whole checkpoint whose configuration names modules in all ways that there are.
MAKE = f"""
from pathlib import Path
from megatron.checkpoint import Fragment, Meta, save
from megatron.config import load, to_yaml
from megatron.model.stack import build_model
from megatron.parallel.layers.parameters import logical_of, stored_tensors
words = ["tokenizer.type=bytes", "model.vocab_size=512", "run.dir=run", "launch.device=cpu"]
evil = ["model.extensions=[evil_module]", "optimizer.type=evil_optimizer:THING", "hooks=[evil_hook:Thing]",
        "launch.runner=evil_runner:RUNNER"]
for folder, more in (("plain", []), ("run", evil)):
    found = load([{str(ROOT / "configs/test/tiny_llama.yml")!r}], [*words, *more], ranks=1, check_inputs=False)
    model = build_model(found.config)
    parts = [Fragment(logical_of(each), state, 0, 1, 0, each.detach().float().view(-1))
             for each in stored_tensors(model) for state in ("weight", "master")]
    Path(folder).mkdir()
    Path(folder, "config.yml").write_text(to_yaml(found))
    Path(folder, "metrics.jsonl").write_text('{{"step": 0, "loss": 1.0}}\\n')
    save(Path(folder, "checkpoints"), 1, parts, Meta(step=1, config=to_yaml(found)))
Path("raw").mkdir()  # not resolved, and the file that it extends has the names
Path("raw/metrics.jsonl").write_text('{{"step": 0, "loss": 1.0}}')
Path("raw/config.yml").write_text("extends: base.yml")
Path("raw/base.yml").write_text("{{extends: {ROOT}/configs/test/tiny_llama.yml, model: {{extensions: [evil_module]}}}}")
"""


def python(folder: Path, *words, marker: Path, **more: str) -> CompletedProcess[str]:
    marker.mkdir(exist_ok=True)
    path = f"{ROOT}{os.pathsep}{folder}"
    return forked(*words, folder=folder, PYTHONPATH=path, MARKER=str(marker), **more)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stranger")
    for name in MODULES:
        (folder / f"{name}.py").write_text(EVIL)
    made = python(folder, "-c", MAKE, marker=folder / "own")
    assert made.returncode == 0, made.stderr
    assert (folder / "own" / "evil_module").exists()  # the stranger's process imports it: the marker works
    return folder


CHECKPOINT = "run/checkpoints/step_00000001"
TEACH = ("config.py", "check", ROOT / "configs/test/tiny_llama.yml", "tokenizer.type=bytes", "model.vocab_size=512")
COMMANDS = {
    "generate": (ROOT / "generate.py", "run", "--prompt", "a", "--tokens", "1", "--device", "cpu"),
    "to_hf": (ROOT / "tools/checkpoint/to_hf.py", "run", "{out}"),
    "to_rwkv": (ROOT / "tools/checkpoint/to_rwkv.py", "run", "{out}"),
    "reshape": (ROOT / "tools/checkpoint/reshape.py", CHECKPOINT, "{out}", "--to", "tensor=2"),
    "report": (ROOT / "tools/report.py", "run", "--output", "{out}.html"),
    "report of a file that is not resolved": (ROOT / "tools/report.py", "raw", "--output", "{out}.html"),
    "compare": (ROOT / "tools/compare.py", "run", "plain", "--output", "{out}.png"),
    "teacher": (
        *(ROOT / "tools" / TEACH[0], *TEACH[1:]),
        *("objective.type=distillation", f"objective.teacher={CHECKPOINT}", "data.synthetic=copy"),
    ),
    "notebook": ("-c", f"from megatron import api; api.open_model({CHECKPOINT!r})"),
    "tensors": (ROOT / "tools/checkpoint/inspect.py", CHECKPOINT),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_imports_what_a_checkpoint_names(stranger, tmp_path, name):
    """All are refused with the modules' names and the flag, but for the one that needs no configuration."""
    words = [str(each).format(out=tmp_path / "out") if name != "notebook" else each for each in COMMANDS[name]]
    done = python(stranger, *words, marker=tmp_path / "marker")
    assert not list((tmp_path / "marker").iterdir()), done.stdout + done.stderr
    said = done.stdout + done.stderr
    if name == "tensors":
        assert done.returncode == 0, said
        return
    assert done.returncode != 0 and "evil_module" in said, said
    assert "--extensions evil_module" in said and "importing a module runs its code" in said
    assert name == "notebook" or "Traceback" not in said


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_the_user_admits_modules(stranger, tmp_path, how):
    """Only the named modules: the checkpoint's hook, runner and optimizer stay out."""
    flag, more = (["--extensions", "evil_module"], {}) if how == "flag" else ([], {"DEEPY_EXTENSIONS": "evil_module"})
    done = python(stranger, *COMMANDS["generate"], *flag, marker=tmp_path / "marker", **more)
    assert done.returncode == 0, done.stderr
    assert [each.name for each in (tmp_path / "marker").iterdir()] == ["evil_module"]
    words = [str(each).format(out=tmp_path / "out") for each in COMMANDS["reshape"]]
    done = python(stranger, *words, *flag, marker=tmp_path / "marker", **more)
    assert done.returncode == 0, done.stderr
    assert [each.name for each in (tmp_path / "marker").iterdir()] == ["evil_module"]


def test_a_run_lists_the_modules_of_its_teacher(stranger, tmp_path):
    words = (*COMMANDS["teacher"], "model.extensions=[evil_module]")
    done = python(stranger, *words, marker=tmp_path / "marker")
    assert [each.name for each in (tmp_path / "marker").iterdir()] == ["evil_module"], done.stdout + done.stderr
    assert "importing a module" not in done.stdout + done.stderr
