"""Real launchers, agents and ranks on this machine: the environment of ranks, the messages to each, and the files that
remain."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pty
import signal
import struct
import termios
import time

import pytest

from tests.launch.running import Job, gone
from tests.selection import toured

NASTY = [
    "",
    " ",
    "a b",
    "it's",
    'c"d',
    "$HOME",
    "`id`",
    "$(id)",
    "x;id",
    "a\nb",
    "tab\there",
    "#x",
    "%h %n",
    "*.py",
    "~",
    "back\\slash",
    '{"a": 1}',
    "(p)",
    "!!",
    "&",
    "|",
    ">",
    "<",
    "é ß 漢",
    "--",
    "-x",
    "=",
    "a=b",
    "\x1e",
    "--ranks-not",
]


def test_what_a_rank_is_given(tmp_path):
    job = Job(
        tmp_path, "describe", *NASTY, ranks=3, overrides=("launch.bind=cores", "launch.environment.ODD='line1 $X `id`'")
    )
    status, out, error = job.finish()
    assert status == 0, error
    given = [job.note(f"given.{rank}") for rank in range(3)]
    for rank, each in enumerate(given):
        env = each["environment"]
        assert each["argv"] == NASTY
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (
            str(rank),
            "3",
            str(rank),
            "3",
        )
        assert env["MASTER_ADDR"] == "127.0.0.1" and 1024 <= int(env["MASTER_PORT"]) <= 65535
        assert env["ODD"] == "line1 $X `id`"
        assert each["mode"] == "0o600"
        assert hashlib.sha256(each["config"].encode()).hexdigest() == env["JOB_CONFIG_SHA256"]
        assert "launched" in each["config"]
        assert each["session"] == each["pid"]
        assert not os.path.exists(env["JOB_CONFIG"]), "the private file must go with the run"
    assert len({each["environment"]["MASTER_PORT"] for each in given}) == 1
    # Only rank 0 speaks, each stream on its own. Everybody has a log.
    assert out == "hello from 0\n"
    assert "error of 0" in error and "error of 1" not in error
    assert all(f"hello from {rank}" in job.log(rank) and f"error of {rank}" in job.log(rank) for rank in range(3))


@pytest.mark.tour
def test_omp_threads_are_a_share_of_the_cores_unless_set(tmp_path):
    cores = len(os.sched_getaffinity(0))
    for name, given in (("share", None), ("set", "7")):
        folder = tmp_path / name
        folder.mkdir()
        overrides = (f"launch.environment.OMP_NUM_THREADS='{given}'",) if given else ()
        job = Job(folder, "describe", ranks=2, overrides=overrides, without=("OMP_NUM_THREADS",))
        assert job.finish()[0] == 0
        assert job.note("given.1")["environment"]["OMP_NUM_THREADS"] == (given or str(max(cores // 2, 1)))


@pytest.mark.tour
def test_everybody_speaks_if_asked_to(tmp_path):
    status, out, _ = Job(tmp_path, "describe", ranks=3, options=("--console", "all")).finish()
    assert status == 0
    host = os.uname().nodename
    assert sorted(filter(None, out.splitlines())) == sorted([
        "hello from 0",
        f"[{host}:1] hello from 1",
        f"[{host}:2] hello from 2",
    ])


@pytest.mark.tour
def test_rank_0_has_a_terminal_where_the_launcher_has_one(tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    job = Job(tmp_path, "looks", ranks=2, stdout=theirs, without=("COLUMNS", "LINES"))
    assert job.finish()[0] == 0
    assert job.note("terminal.0") == [True, False, [101, 33]] and job.note("terminal.1") == [False, False, None]
    assert os.read(ours, 1000) == b"10 %\r100 %\r\n", "as it is; the real terminal ends its lines as terminals do"
    os.close(theirs)
    os.close(ours)
    assert "Z 100 %\n" in job.log(0), "a log keeps the last state of a live line"


@pytest.mark.tour
def test_a_flood_of_output_arrives_whole(tmp_path):
    job = Job(tmp_path, "floods", ranks=2)
    status, out, error = job.finish()
    assert status == 0
    expected = [f"{number}:" + "x" * (number % 2500) for number in range(3000)]
    assert out.splitlines() == expected[1::2]
    assert [line for line in error.splitlines() if not line.startswith("deepy:")] == expected[::2]
    logged = [line.split(" ", 1)[1] for line in job.log(1).splitlines()][1:-1]
    assert sorted(logged) == sorted(expected)


@pytest.mark.parametrize(
    "number", toured([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
)
def test_a_signal_reaches_all_ranks_and_its_status_comes_back(tmp_path, number):
    job = Job(tmp_path, "trainer", ranks=3)
    pids = [job.note(f"up.{rank}") for rank in range(3)]
    job.process.send_signal(number)
    status, _, error = job.finish()
    assert [job.note(f"saved.{rank}") for rank in range(3)] == [number] * 3
    assert status == 128 + number
    assert "Traceback" not in error and "first failure" not in error
    assert all(gone(pid) for pid in pids)


@pytest.mark.tour
def test_ranks_that_reach_their_end_after_a_signal_went_well(tmp_path):
    job = Job(tmp_path, "finisher", ranks=2)
    job.note("up.0"), job.note("up.1")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == 0


@pytest.mark.tour
def test_slow_savers_are_not_hurried_by_quick_ones(tmp_path):
    job = Job(tmp_path, "uneven", ranks=2)
    job.note("up.0"), job.note("up.1")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == 143
    assert job.note("saved.1") == 1, "rank 1 was told once, and saved for longer than failures are given"


@pytest.mark.tour
def test_ranks_that_do_not_stop_are_killed_after_the_grace(tmp_path):
    job = Job(tmp_path, "stubborn", ranks=2, overrides=("launch.grace=1.0",))
    pids = [job.note(f"up.{rank}") for rank in range(2)]
    begin = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    status, _, error = job.finish()
    assert time.monotonic() - begin > 0.9
    assert status == 137 and all(gone(pid) for pid in pids), error
    assert "launch.grace" in error and "memory" not in error


@pytest.mark.tour
def test_a_second_signal_ends_at_once(tmp_path):
    job = Job(tmp_path, "stubborn", ranks=2, overrides=("launch.grace=1000.0",))
    pids = [job.note(f"up.{rank}") for rank in range(2)]
    job.process.send_signal(signal.SIGINT)
    job.hears("SIGINT: passed on to all ranks")
    time.sleep(0.4)  # the same one that comes along another way within 0.3 s is no second one
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    status, _, error = job.finish()  # which waits for less than the grace
    assert status == 130 and "at once" in error
    assert all(gone(pid) for pid in pids)


@pytest.mark.tour
def test_a_killed_launcher_leaves_nothing_and_the_ranks_save(tmp_path):
    job = Job(tmp_path, "trainer", ranks=2)
    pids = [job.note(f"up.{rank}") for rank in range(2)]
    job.process.kill()
    job.process.wait()
    assert all(gone(pid) for pid in pids)
    assert [job.notes.joinpath(f"saved.{rank}").read_text() for rank in range(2)] == [str(int(signal.SIGTERM))] * 2


@pytest.mark.tour
def test_a_killed_agent_takes_its_ranks_along(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    job = Job(tmp_path, "stubborn", ranks=2)
    pids = [job.note(f"up.{rank}") for rank in range(2)]
    agent = int(open(f"/proc/{pids[0]}/stat").read().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    status, _, error = job.finish()
    assert status == 255 and "was lost" in error, error
    assert all(gone(pid) for pid in pids)
    assert list((tmp_path / "tmp").iterdir()) == [], "no private folder is left"


def test_the_first_failure_is_named_though_a_peer_ends_otherwise(tmp_path):
    job = Job(tmp_path, "reacts", ranks=3)
    status, _, error = job.finish()
    assert status == 137
    assert "first failure: rank 1" in error and "SIGKILL (137)" in error
    assert "memory" in error, "a hint at the usual cause"


@pytest.mark.tour
def test_a_complaint_that_is_heard_first_is_known_when_the_silent_end_came_before_it(tmp_path):
    job = Job(tmp_path, "complains")
    status, _, error = job.finish()
    assert status == 137 and "first failure: rank 1" in error, error


@pytest.mark.tour
def test_the_first_traceback_is_shown_last_and_once(tmp_path):
    job = Job(tmp_path, "raises", ranks=4)
    status, out, error = job.finish()
    assert status == 1
    assert error.count("Traceback (most recent call last)") == 2, (
        "the cause and what it is chained to; rank 0's reaction is in its log"
    )
    assert "the real cause" in error and "Connection closed by peer" not in error
    assert "Connection closed by peer" in job.log(0)
    host = os.uname().nodename
    last = error.splitlines()[-6:]
    assert any(f"[{host}:2] RuntimeError: CUDA out of memory" in line for line in last), error
    assert any("likely cause" in line and "micro_batch_size" in line for line in last)


@pytest.mark.tour
@pytest.mark.parametrize("rank", [0, 1])
def test_a_reason_without_a_traceback_is_shown_once(rank, tmp_path):
    """Rank 0's as it came, another's by the launcher, with its name."""
    status, _, error = Job(tmp_path, "refuses", str(rank), ranks=2).finish()
    assert status == 2 and error.count("the reason, in a sentence") == 1, error
    assert (f":{rank}] the reason" in error) == (rank != 0)


@pytest.mark.tour
def test_a_survived_traceback_is_shown(tmp_path):
    for seconds in ("0", "3.5"):
        status, _, error = Job(tmp_path, "caught", seconds, ranks=1).finish()
        assert status == 0 and error.count("KeyError: 'harmless'") == 1


@pytest.mark.tour
@pytest.mark.parametrize("end", ["well", "killed"])
def test_descendants_of_ranks_end_too(tmp_path, end):
    job = Job(tmp_path, "family", "0.3" if end == "well" else "600", ranks=1)
    pids = job.note("family.0")
    if end == "killed":
        os.kill(pids[0], signal.SIGKILL)
    status, _, _ = job.finish()
    assert status == (0 if end == "well" else 137)
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(("ends", "status"), [("0,0", 0), ("0,5", 5), ("200,200", 200), ("2,2", 2)])
def test_statuses_pass_through(tmp_path, ends, status):
    assert Job(tmp_path, "exits", ends).finish()[0] == status


@pytest.mark.tour
def test_restarts_until_it_works_each_with_a_port_of_its_own(tmp_path):
    job = Job(tmp_path, "flaky", ranks=1, options=("--restarts", "5"), overrides=("launch.restart_delay=0.1",))
    status, _, error = job.finish()
    assert status == 0, error
    assert len({job.note(f"attempt{attempt}.0") for attempt in range(3)}) == 3
    assert error.count("restart ") >= 2 and not (job.notes / "attempt3.0").exists()


@pytest.mark.tour
def test_no_more_restarts_than_allowed(tmp_path):
    status, _, error = Job(
        tmp_path, "flaky", ranks=1, options=("--restarts", "1"), overrides=("launch.restart_delay=0.1",)
    ).finish()
    assert status == 3


def test_mistakes_of_the_configuration_start_nothing_and_are_not_tried_again(tmp_path):
    job = Job(tmp_path, "describe", options=("--restarts", "5"), overrides=("training.stepz=3", "optimizer.lr=fast"))
    status, out, error = job.finish()
    assert status == 2 and "stepz" in error and "optimizer.lr" in error
    assert not list(job.notes.iterdir()) and not (tmp_path / "runs").exists()


@pytest.mark.tour
def test_a_script_that_refuses_the_configuration_is_not_tried_again(tmp_path):
    job = Job(tmp_path, "exits", "2", ranks=1, options=("--restarts", "5"), overrides=("launch.restart_delay=0.1",))
    status, _, error = job.finish()
    assert status == 2 and "restart" not in error.replace("launch.restart", "")


def test_the_command_lines_of_launcher_and_agent_hide_the_environment(tmp_path):
    (tmp_path / "variables").write_text("API_KEY=hushhush\n")
    job = Job(tmp_path, "trainer", ranks=1, overrides=(f"launch.environment_file={tmp_path}/variables",))
    pid = job.note("up.0")
    agent = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    for process in (pid, agent):
        assert b"hushhush" not in open(f"/proc/{process}/cmdline", "rb").read()
    assert open(f"/proc/{agent}/cmdline").read().split("\0")[-2] == "--agent"
    job.process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == 143
