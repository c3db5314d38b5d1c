"""Files that are none, and texts that steer a terminal: nothing waits for the first, nothing prints the second."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.format.durable import write_file
from megatron.config import load, to_yaml
from megatron.config.file_access import NOT_PLAIN, read_plain, replace_file, unreadable
from megatron.config.source.arguments import split
from megatron.data.errors import DataError
from megatron.data.token_file import TokenFile
from megatron.pipes import visible
from megatron.report.append import AppendFile
from tests.data.make import write_documents
from tests.paths import ROOT


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Path]:
    """A FIFO without a writer, a device without an end, and links to both."""
    os.mkfifo(tmp_path / "fifo")
    found = {"fifo": tmp_path / "fifo", "device": Path("/dev/zero")}
    for name, path in list(found.items()):
        (tmp_path / f"{name}-link").symlink_to(path)
        found[f"{name}-link"] = tmp_path / f"{name}-link"
    return found


def test_what_is_no_plain_file_is_refused_at_once(odd: dict[str, Path], tmp_path: Path) -> None:
    for path in odd.values():
        with pytest.raises(OSError, match="plain file is needed"):
            read_plain(path)
        assert NOT_PLAIN in str(unreadable(path))
    (tmp_path / "a").write_bytes(b"12345")
    assert read_plain(tmp_path / "a", 5) == b"12345" and unreadable(tmp_path / "a") is None
    with pytest.raises(ValueError, match="too large"):
        read_plain(tmp_path / "a", 4)


def test_a_token_file_whose_index_is_a_fifo(odd: dict[str, Path], tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", [[1, 2, 3]])
    os.replace(odd["fifo"], tmp_path / "corpus.idx")
    with pytest.raises(DataError, match="plain file is needed"):
        TokenFile(tmp_path / "corpus")


def test_a_log_goes_into_no_file_behind_a_link(odd: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "precious")
    for path in (tmp_path / "metrics.jsonl", *odd.values()):
        with pytest.raises(OSError):
            AppendFile(path)
    assert (tmp_path / "precious").read_text() == "mine\n"


def test_a_file_is_replaced_whole_and_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious").write_text("mine\n")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    for name in ("config.yml", ".config.yml.7", "config.yml.new", ".config.yml.new"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    replace_file(tmp_path / "config.yml", "a: 1\n", durable=True)
    assert (tmp_path / "config.yml").read_text() == "a: 1\n" and not (tmp_path / "config.yml").is_symlink()
    assert not (tmp_path / ".config.yml.7").is_symlink()
    monkeypatch.setattr(os, "replace", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replace_file(tmp_path / "config.yml", "a: 2\n")
    assert (tmp_path / "config.yml").read_text() == "a: 1\n" and not (tmp_path / ".config.yml.7").exists()
    (tmp_path / ".levels").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        write_file(tmp_path / ".levels", b"a")
    assert (tmp_path / "precious").read_text() == "mine\n"


def test_no_file_of_a_run_is_written_through_a_link() -> None:
    """Each temporary file whose name can be guessed is made by `replacing`, which follows no link."""
    names = re.compile(r"""with_(name|suffix)\(.*(\.new\b|\.tmp\b|getpid)""")
    known = {"megatron/config/file_access.py", "megatron/data/corpus/registry.py"}  # the second: in a folder of texts
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "megatron").rglob("*.py")
        if str(path.relative_to(ROOT)) not in known
        for line in path.read_text(encoding="utf-8").splitlines()
        if names.search(line) and "uuid" not in line
    }
    assert not found


def test_another_interpreter_gets_a_sentence(tmp_path: Path) -> None:
    for script in ("deepy.py", "train.py", "tools/plan.py", "tools/data/tokenize.py"):
        done = subprocess.run([sys.executable, "-S", str(ROOT / script), "--help"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, script
        assert "does not have the packages of requirements/base.txt" in done.stderr
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import megatron"  # a program of somebody else's
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["launcher.json", "logs/rank_0000.log", "metrics.jsonl"])
def test_the_folder_of_a_stranger_does_not_hold_a_question_up(odd: dict[str, Path], tmp_path: Path, name: str) -> None:
    """`--status`, `--logs` and a report about a folder in which such things stand in for files."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    question = {"launcher.json": ["deepy.py", "--status"], "metrics.jsonl": ["tools/report.py"]}
    command = question.get(name, ["deepy.py", "--logs"])
    for path in odd.values():
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(path)
        done = subprocess.run(
            [sys.executable, *command, run], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert "plain file is needed" in done.stderr


def test_status_shows_a_strangers_note_as_text(tmp_path: Path) -> None:
    note = {"host": "\x1b]0;owned\x07", "process": 1, "socket": f"deepy-{'0' * 32}"}
    for text in (json.dumps(note), "[" * 50_000, "7" * 100_000, '{"host": 1, "process": 1e999, "socket": ""}'):
        (tmp_path / "launcher.json").write_text(text)
        command = [sys.executable, "deepy.py", "--status", tmp_path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "\x1b" not in done.stderr and "\x07" not in done.stderr
    assert len(done.stderr) < 1000


def test_control_characters_are_shown_and_letters_are_not_changed() -> None:
    assert visible("a\x1b[2Jb\x9b1m\r\x00\u202e\x7f\udc80") == (
        "a\\u001b[2Jb\\u009b1m\\u000d\\u0000\\u202e\\u007f\\udc80"
    )
    kept = "tab\t line\n \u3000\u00a0 \u0645\u06cc\u200c\u062e \U0001f468\u200d\U0001f469 \u0915\u094d\u200d"
    kept += "\x1b[1mbold\x1b[0m"
    assert visible(kept) == kept
    assert json.loads(visible(json.dumps({"a": "\x9b\u202e"}, ensure_ascii=False))) == {"a": "\x9b\u202e"}


def test_a_tool_prints_names_of_files_as_text(tmp_path: Path) -> None:
    """Standard output and errors of all tools pass one place."""
    code = "import sys; from megatron.pipes import piped\n"
    code += "def main():\n print('\\x1b[2J'); print('\\x9b', file=sys.stderr)\n"
    done = subprocess.run([sys.executable, "-c", f"{code}piped(main)"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "\\u001b[2J\n" and done.stderr == "\\u009b\n"
    code = code.replace("\\x1b[2J", "\\r\\x1b[2Khidden").replace("\\x9b", "\\r\\x1b[2K50 %\\x9b")
    done = subprocess.run([sys.executable, "-c", f"{code}piped(main)"], cwd=ROOT, capture_output=True)
    assert done.stdout == b"\\u000d\\u001b[2Khidden\n" and done.stderr == b"\r\x1b[2K50 %\\u009b\n", "a live line"


def test_a_runs_own_file_starts_it_again_without_warnings(tmp_path: Path) -> None:
    """It says every key. Those with their default values were chosen by no user."""
    plain = load([ROOT / "configs/test/tiny_llama.yml"], [], ranks=1, check_inputs=False)
    (tmp_path / "config.yml").write_text(to_yaml(plain))
    again = load([tmp_path / "config.yml"], [], ranks=1, check_inputs=False)
    assert not again.warnings, again.summary()
    assert again.config == plain.config
    assert load([tmp_path / "config.yml"], ["optimizer.momentum=0.5"], ranks=1, check_inputs=False).warnings


def test_overrides_behind_a_scripts_options() -> None:
    own = ("--set", "training.steps=3", "b=1", "--", "zero.stage=1")
    taken = split(["a.yml", "--tasks", "x", "launch.device=cpu", *own])
    assert taken.overrides == ("launch.device=cpu",)
    assert taken.own == ("--tasks", "x", *own)
