"""Which of many bad ends is reported, and with which exit status."""

from __future__ import annotations

import io
import signal

import pytest

from megatron.launch.report.console import (
    HOST_LOST,
    STOPPED,
    YELLOW,
    Failure,
    describe_status,
    exit_status,
    hint_for,
    last_traceback,
    log,
    outcome,
    report,
    signal_of,
)


def fail(time, rank, status, reason="", text=""):
    return Failure(time, f"h{(rank or 0) // 2}", rank, status, reason, text)


@pytest.mark.parametrize(
    ("status", "shell", "words"),
    [
        (0, 0, "status 0"),
        (1, 1, "status 1"),
        (-9, 137, "SIGKILL (137)"),
        (-15, 143, "SIGTERM (143)"),
        (137, 137, "SIGKILL (137)"),
        (-11, 139, "SIGSEGV (139)"),
        (255, 255, "status 255"),
        (200, 200, "status 200"),
        (128, 128, "status 128"),
    ],
)
def test_statuses_in_numbers_and_words(status, shell, words):
    assert exit_status(status) == shell
    assert describe_status(status) == words


def test_no_signal_in_ordinary_statuses():
    assert [signal_of(status) for status in (0, 1, 2, 77, 127, 128, 255)] == [None] * 7
    assert signal_of(-9) is signal_of(137) is signal.SIGKILL


CASES = [
    ("nothing failed", [], [], 0, None),
    ("nothing failed after a signal", [], [15], 0, None),
    ("one failure", [fail(5, 1, 3)], [], 3, 1),
    ("the earliest counts, not the first that was heard of", [fail(5, 0, 77), fail(4, 3, -9)], [], 137, 3),
    ("the earliest counts, not the highest", [fail(4, 0, 1), fail(5, 1, 200)], [], 1, 0),
    ("a lost host", [fail(9, None, HOST_LOST)], [], 255, None),
    ("a rank before the loss of another host", [fail(4, 2, 5), fail(9, None, HOST_LOST)], [], 5, 2),
    ("a lost host before its peers' reactions", [fail(3, None, HOST_LOST), fail(4, 0, 1)], [], 255, None),
    ("a rank rather than its host at the same moment", [fail(3, None, HOST_LOST), fail(3, 0, -9)], [], 137, 0),
    ("all obeyed", [fail(1, 0, 143), fail(2, 1, -15)], [15], 143, None),
    ("all obeyed the warning", [fail(1, 0, 138), fail(2, 1, 138)], [10], 138, None),
    ("an ignored signal before the one that was obeyed", [fail(1, 0, 143)], [12, 15], 143, None),
    ("killed because the signal came twice", [fail(1, 0, -9, STOPPED), fail(1, 1, -9, STOPPED)], [2, 2], 130, None),
    ("one obeyed, one failed", [fail(1, 0, 143), fail(2, 1, 1)], [15], 1, 1),
    ("killed, though the signal was another", [fail(1, 0, -9)], [15], 137, 0),
    ("stopped by the launcher after a peer's failure", [fail(1, 1, 4), fail(2, 0, -15, STOPPED)], [], 4, 1),
]


@pytest.mark.parametrize(
    ("failures", "sent", "status", "rank"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_outcome(failures, sent, status, rank):
    got, first = outcome(failures, sent)
    assert got == status
    assert (first is None) == (rank is None and status in (0, 130, 138, 143))
    if first:
        assert first.rank == rank
    assert outcome(failures[::-1], sent)[0] == status, "the order in which news arrives must not matter"


CHAIN = """step 1
Traceback (most recent call last):
  File "old.py", line 1, in old
KeyError: 'harmless and long ago'
step 2
Traceback (most recent call last):
  File "a.py", line 1, in a
ValueError: the real cause

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in b
RuntimeError: what it became"""


def test_the_last_traceback_with_its_causes_and_nothing_older():
    shown = last_traceback(CHAIN)
    assert shown.startswith("Traceback") and "the real cause" in shown and shown.endswith("what it became")
    assert "long ago" not in shown


def test_a_traceback_as_torch_writes_it():
    text = "fine\n" + "\n".join(f"[rank3]: {line}" for line in CHAIN.splitlines())
    assert last_traceback(text) == last_traceback(CHAIN)


def test_without_a_traceback_the_last_lines():
    text = "\n".join(f"line {number}" for number in range(100))
    assert last_traceback(text).splitlines() == [f"line {number}" for number in range(80, 100)]


def test_a_huge_traceback_keeps_its_ends():
    text = (
        "Traceback (most recent call last):\n"
        + "\n".join(f"  frame {number}" for number in range(5000))
        + "\nRecursionError: deep"
    )
    shown = last_traceback(text).splitlines()
    assert len(shown) < 100 and shown[0].startswith("Traceback") and shown[-1] == "RecursionError: deep"


def test_the_report_names_rank_host_log_cause_and_status():
    first = fail(4.0, 3, 1, text=CHAIN.replace("what it became", "CUDA out of memory"))
    text = report(first, [fail(5, 0, 77), fail(5, 1, -15, STOPPED)], 12.0, "runs/x/logs")
    lines = text.splitlines()
    assert lines[-1] == "deepy: exit status 1"
    for part in (
        "first failure: rank 3 on h1",
        "after 12 s",
        "micro_batch_size",
        "1 x status 77",
        "runs/x/logs/rank_0003.log",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("text", "status", "word"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB", 1, "micro_batch_size"),
        ("RuntimeError: HIP out of memory.", 1, "micro_batch_size"),
        ("RuntimeError: unable to write to file </torch_12_34>: No space left on device; /dev/shm", 1, "/dev/shm"),
        ("ERROR: Unexpected bus error encountered in worker. insufficient shared memory (shm)", 1, "/dev/shm"),
        ("", -7, "/dev/shm"),
        ("OSError: [Errno 28] No space left on device: 'checkpoints/step_1'", 1, "disk is full"),
        ("OSError: [Errno 30] Read-only file system: 'runs/x'", 1, "run.dir"),
        ("read\ncheckpoint.levels: node1: [Errno 30] Read-only file system: '/l'", 2, "a level of checkpoint.levels"),
        ("OSError: [Errno 98] Address already in use", 1, "port"),
        ("EADDRINUSE", 1, "port"),
        ("Host key verification failed.", 255, "known_hosts"),
        ("u@h: Permission denied (publickey,password).", 255, "ssh-copy-id"),
        ("ssh: Could not resolve hostname h9: Name or service not known", 255, "hostfile"),
        (
            "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp, unhandled system error, ncclSystemError",
            1,
            "NCCL_DEBUG",
        ),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE", 1, "launch.timeout"),
        (
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete",
            1,
            "launch.timeout",
        ),
        ("RuntimeError: Connection closed by peer [10.0.0.2]:1234", 1, "launch.interface"),
        ("ModuleNotFoundError: No module named 'wandb'", 1, "pip install"),
        ("CUDA error: invalid device ordinal", 1, "launch.ranks"),
        ("", -9, "memory"),
        ("", 137, "memory"),
        ("", -11, "PYTHONFAULTHANDLER"),
    ],
)
def test_known_causes(text, status, word):
    assert word in (hint_for(text, status) or ""), hint_for(text, status)


def test_no_cause_is_invented():
    assert hint_for("ValueError: boom", 1) is None


PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4321"


@pytest.mark.parametrize(
    ("others", "rank"),
    [
        ([fail(10.4, 3, -9)], 3),  # its agent noticed late that it was killed
        ([fail(10.4, 3, -11), fail(10.2, 2, 1, text=PEER)], 3),
        ([fail(27.0, 3, -9)], 0),  # long after: that was something else
        ([fail(10.4, 3, -6)], 0),  # NCCL's watchdog aborts ranks that have lost a peer
        ([fail(10.4, 3, -9, reason=STOPPED)], 0),  # killed by us
        ([fail(10.4, 3, 1, text="ValueError")], 3),
        ([fail(10.4, 3, 1)], 0),  # it did not say why
        ([], 0),
    ],
)
def test_a_complaint_about_a_peer_does_not_come_before_the_peers_death(others, rank):
    assert outcome([fail(10.0, 0, 1, text=PEER), *others], [])[1].rank == rank


@pytest.mark.parametrize(
    ("others", "rank"),
    [([fail(10.1, 3, -9)], 3), ([fail(10.1, 3, 1, text="ValueError: no")], 0), ([fail(27.0, 3, -9)], 0)],
)
def test_a_rank_without_words_may_have_complained_about_the_one_that_was_killed(others, rank):
    """An agent that has sent the last words of the killed rank, a warning of torch's, sends no others."""
    assert outcome([fail(10.0, 0, 1), *others], [])[1].rank == rank


@pytest.mark.parametrize(
    "text",
    [
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Socket closed [10.0.0.2]:4321",
        "RuntimeError: [gloo/transport/tcp/pair.cc:592] Read error [10.0.0.2]:4321: connection reset by peer",
    ],
)
def test_other_words_for_a_lost_peer(text):
    assert outcome([fail(10.0, 0, 1, text=text), fail(18.0, 3, -9)], [])[1].rank == 3


def test_a_failure_of_its_own_is_no_complaint():
    assert outcome([fail(10.0, 0, 1, text="ValueError: no"), fail(10.1, 3, -9)], [])[1].rank == 0


def test_colours_are_for_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        log("a warning", stream, colour=YELLOW)
    assert terminal.getvalue() == "\x1b[33mdeepy: a warning\x1b[0m\n" and pipe.getvalue() == "deepy: a warning\n"
