"""--status and --stacks of a run that cannot answer. The others are in test_hangs.py."""

from __future__ import annotations

import json
import re
import secrets
import selectors
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.config.problems import UserError
from megatron.launch import supervisor
from megatron.launch.command_line import main
from megatron.launch.job.job_plan import make_plan
from megatron.launch.watch import watch as inquiry
from megatron.launch.watch.diagnosis import Rank
from megatron.launch.watch.watch import FILE, InquirySocket, ask, of_ranks, pause
from tests.paths import ROOT


def note(folder: Path, **changes: object) -> str:
    """Files that a launcher leaves in the run's folder. The name of its socket."""
    name = f"deepy-{secrets.token_hex(16)}"
    told = {"host": socket.gethostname(), "process": 1, "socket": name, "started": time.time(), **changes}
    (folder / FILE).write_text(json.dumps(told))
    return name


def refused(run: Path) -> str:
    with pytest.raises(UserError) as found:
        ask(run, "status")
    return str(found.value)


def test_a_second_launcher_is_refused_before_it_touches_the_run(tmp_path, monkeypatch, capsys):
    """Its `launcher.json` and its ledger stay as the first one has them, and no process is started."""
    run = tmp_path / "run"
    script = "import sys; from megatron.worker.writer_lock import take; from pathlib import Path; "
    script += "held = take(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", script, str(run / "checkpoints" / ".writer")]
    plan = make_plan(str(ROOT / "train.py"), [str(ROOT / "configs/test/tiny_neox.yml"), f"run.dir={run}"], [], {})
    monkeypatch.setattr(supervisor, "start", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr(supervisor, "LINGER", 0.0)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as first:
        assert first.stdout.readline() == "mine\n"
        before = {path: path.read_text() for path in run.rglob("*") if path.is_file()}
        assert supervisor.supervise(plan) == 2
        assert {path: path.read_text() for path in run.rglob("*") if path.is_file()} == before
        error = capsys.readouterr().err
        assert f"another run writes to {run}/checkpoints (process {first.pid} on " in error
    monkeypatch.setattr(supervisor, "start", lambda *_: SimpleNamespace(status=0))
    assert supervisor.supervise(plan) == 0, "the first one has ended"


def test_a_run_that_never_began_or_has_ended(tmp_path, capsys):
    assert refused(tmp_path / "none") == (
        f"{tmp_path / 'none'} is not a folder: give the directory of a run (run.dir) that deepy.py has started and "
        "that has not ended"
    )
    assert "has no launcher at work" in refused(tmp_path)
    (tmp_path / "file").touch()
    assert "is not a folder" in refused(tmp_path / "file")
    for option in ("--status", "--stacks"):
        assert main([option, str(tmp_path)]) == 2 and "deepy: " in capsys.readouterr().err


def test_a_launcher_that_was_killed_is_gone(tmp_path):
    note(tmp_path, process=77)
    assert refused(tmp_path) == f"the launcher of {tmp_path} (process 77 on {socket.gethostname()}) is gone"
    note(tmp_path, host="elsewhere")
    assert refused(tmp_path) == f"the launcher of {tmp_path} is on elsewhere: ask there"
    note(tmp_path, host="a;b", slurm_job="12")
    words = shlex.split(refused(tmp_path).partition("ask there: ")[2])
    assert words[:3] == ["srun", "--overlap", "--jobid=12"] and "--nodelist=a;b" in words
    assert words[-2:] == ["--status", str(tmp_path)]
    note(tmp_path, host="elsewhere", slurm_job="1;rm")
    assert refused(tmp_path).endswith("ask there")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"host": "a", "process": "x", "socket": "y"}', "[" * 100_000, "\0\xff", '{"host": "a"}']
    + [json.dumps({"host": "a", "process": 1, "socket": name}) for name in ("\ud800", "x" * 500, "", "deepy-1")],
)
def test_a_note_that_makes_no_sense_is_told(tmp_path, text):
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    assert f"{FILE} cannot be read" in refused(tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    assert f"{FILE} cannot be read" in refused(tmp_path)


def serving(name: str, answer: Callable[[socket.socket], None]) -> threading.Thread:
    """Somebody who listens by this name, for one call."""
    here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    here.bind(f"\0{name}")
    here.listen(1)

    def serve() -> None:
        with here, here.accept()[0] as caller:
            answer(caller)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_a_launcher_that_ends_before_it_answers_is_gone(tmp_path):
    for answer in (lambda caller: caller.recv(64), lambda caller: None):  # the second leaves the question unread
        thread = serving(note(tmp_path), answer)
        assert "is gone" in refused(tmp_path)
        thread.join()


def test_a_launcher_that_says_nothing_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(inquiry, "ANSWER_TAKES", 0.2)
    end = threading.Event()
    thread = serving(note(tmp_path), lambda caller: end.wait(60) and None)
    assert "does not answer" in refused(tmp_path)
    end.set()
    thread.join()


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path):
    serving(note(tmp_path), lambda caller: caller.sendall(b"\xff\xfe" + caller.recv(64)))
    assert ask(tmp_path, "status") == "\ufffd\ufffdstatus\n"


def test_the_launchers_end_answers_what_it_knows_and_nothing_else(tmp_path):
    """Strange questions get no answer, and delay no other."""
    ranks = [Rank(0, "node1", 7, "running", 3, "forward")]
    job = SimpleNamespace(world_size=1, hosts=["node1"], attempt=2)
    watch = SimpleNamespace(ask=lambda stacks, then: then(ranks), launcher=SimpleNamespace(job=job))
    selector = selectors.DefaultSelector()
    window = InquirySocket(of_ranks(watch), selector, tmp_path)
    name, over = json.loads((tmp_path / FILE).read_text())["socket"], threading.Event()

    def loop() -> None:
        while not over.is_set():
            for key, _ in selector.select(0.02):
                key.data()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        for question in (b"", b"\xff" * 64, b"Status\n", b"status; stacks\n"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.connect(f"\0{name}")
                line.sendall(question or b"\n")
                try:
                    assert line.recv(10) == b""
                except ConnectionResetError:  # it has left the rest unread
                    pass
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:  # asks nothing
            silent.connect(f"\0{name}")
            said = ask(tmp_path, "status")
        assert said.startswith("1 rank on 1 host, restart 2, started 0 min ago\n") and "forward of step 3" in said
        assert ask(tmp_path, "stacks").startswith("rank 0 on node1, in forward of step 3\n")
    finally:
        over.set()
        thread.join()
        window.close()
    assert not (tmp_path / FILE).exists() and "has no launcher at work" in refused(tmp_path)


def test_between_two_starts_a_run_answers_too(tmp_path):
    """After a failure the launcher waits up to ten minutes."""
    thread = threading.Thread(target=pause, args=(5.0, tmp_path, "restart 2 of 9 after SIGKILL (137)"))
    begin = time.monotonic()
    thread.start()
    while not (tmp_path / FILE).exists():
        time.sleep(0.01)
    said = ask(tmp_path, "status")
    assert re.fullmatch(r"no rank is running: restart 2 of 9 after SIGKILL \(137\), continuing in [0-5] s\n", said)
    assert ask(tmp_path, "stacks").startswith("no rank is running")
    thread.join()
    assert time.monotonic() - begin >= 5.0 and not (tmp_path / FILE).exists()
    pause(0.0, tmp_path / "none" / "yet", "nothing")
