"""One run from its first start to its end, with its restarts, and its memory, reported before devices are taken."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.config.problems import counted
from megatron.installation import code_now
from megatron.worker import devices, network
from megatron.worker.job import CONFIG_ERROR, CORRUPT, RERUN
from megatron.worker.writer_lock import holder

from ..config.problems import ConfigError, list_problems
from ..report.ledger import Ledger, goodput, read_ledger
from .job.hosts import HostError
from .job.job_plan import JobPlan, commands, restarted, with_spares, without_hosts
from .launcher.launcher import Launcher, Result
from .report.console import COMPLAINT, HANG, NO_PROGRESS, YELLOW, Failure, describe_status, last_traceback, log, report
from .watch.watch import pause
from .wire.listener import VARIABLE, AgentListener, write_file

_OUTSIDE = re.compile(
    r"(\w+\.)*\w*(OS|IO|Timeout|Connection|BrokenPipe|FileNotFound|Permission)\w*Error|(\w+\.)*StoreRefuses"
)  # may pass
CYCLES = 3  # starts in a row that come no further than those before


@dataclass
class Restarts:
    """Decides from one failure to the next.

    Args:
        allowed: how many restarts there may be.
    """

    allowed: int
    done: int = 0
    furthest: int | None = None  # step that some start has come to
    idle: int = 0  # starts in a row that did not come further
    last: tuple[int, int, str] | None = None  # cause of the last failure
    _repeated: bool = field(default=False, repr=False)

    def refusal(self, result: Result) -> str | None:
        """Why a failed run is not started again, in words, "" without a reason to print, None if it is started again.

        It is not after a signal to the launcher, nor where the ranks were never started: hosts that never answered are
        a mistake, not a failure. Nor after a mistake in the configuration."""
        self.note(result)
        if self.done >= self.allowed or result.signals or result.status == CONFIG_ERROR:
            return ""
        if self.done == 0 and not result.started:
            return ""
        if self._repeated:
            assert self.last is not None
            step, _, what = self.last
            where = f"at step {step}" if step >= 0 else "before the first step"
            return f"not started again: {what} has come twice {where}, so it would come again"
        if self.idle >= CYCLES:
            return f"not started again: {CYCLES} starts in a row have come no further than step {self.furthest}"
        return None

    def note(self, result: Result) -> None:
        """Take in how a start ended."""
        steps = [each.step for each in result.failures if each.step is not None]
        here = max(steps, default=None)
        if here is not None:
            further = self.furthest is None or here > self.furthest
            self.idle = 0 if further else self.idle + 1
            self.furthest = here if further else self.furthest
        cause = _cause(result.first)
        self._repeated = cause is not None and cause == self.last
        self.last = cause


def _cause(failure: Failure | None) -> tuple[int, int, str] | None:
    """The identity of a failure: step, status, and the exception's own words. None of one that chance may have brought:
    a killed process, a lost host, a hang, a peer that has gone."""
    if failure is None or failure.step is None or failure.status in (HANG, RERUN):
        return None
    if failure.disagreement:
        return failure.step, 0, "a disagreement of ranks"
    if failure.status <= 0:
        return None
    lines = last_traceback(failure.text).strip().splitlines()
    if failure.reason or not lines or "Traceback" not in failure.text or COMPLAINT.search(failure.text):
        return None
    if _OUTSIDE.match(lines[-1]):
        return None
    return failure.step, failure.status, lines[-1][:200] or describe_status(failure.status)


TOLD = "JOB_PLAN_TOLD"  # has the device of the plan, for rank 0
PATIENCE = 20.0  # seconds: torch takes two to import, and a line is not worth a long wait


def tell_need(plan: JobPlan) -> JobPlan:
    """Print the run's predicted needs, if the ranks' device is known here. Return the plan, with the device for rank 0.

    The formulas build layers, for which they need torch. Another process, which sees no device, therefore computes the
    line. Rank 0 does so on a CPU, and where this machine is no host of the run or has another device than the ranks."""
    config = plan.resolved.config
    if not config.logging.predictions or Path(plan.script).name != "train.py" or plan.launch.device == "cpu":
        return plan
    name = devices.name_of_first(os.environ) if _among_hosts(plan) else None
    if name is None:
        return plan
    said = _said(plan, name)
    for line in said:
        log(line, colour=YELLOW if line.startswith("warning") else "")
    job = replace(plan.job, environment={**plan.job.environment, TOLD: name}) if said else plan.job
    return replace(plan, job=job)


def _among_hosts(plan: JobPlan) -> bool:
    """Whether ranks start on this machine: a login node may have another device than they."""
    if plan.choice.starter.here:
        return True
    own = socket.gethostname().partition(".")[0]
    known = {own, "localhost", os.environ.get("SLURMD_NODENAME"), *(each.address for each in network.addresses())}
    names = [host.name for host in plan.choice.hosts]
    return any(name in known or name.partition(".")[0] == own for name in names)


def _said(plan: JobPlan, device: str) -> list[str]:
    """Lines of another process, none where it fails: a failed plan must not end a run."""
    top = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, (str(top), os.environ.get("PYTHONPATH"))))
    hidden = {name: "" for names in devices.VISIBLE.values() for name in names}
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", **hidden}
    per_host = max(len(host.slots) for host in plan.choice.hosts)
    words = ["-m", "megatron.plan", "-", str(plan.choice.ranks), str(per_host), device]
    try:
        done = subprocess.run(
            [sys.executable, *words], check=False,
            input=plan.job.configuration, capture_output=True, text=True, env=environment, timeout=PATIENCE,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.startswith(("plan: ", "      ", "warning: "))]


LONGEST_DELAY = 600.0
LINGER = 15.0  # seconds that the ranks of a launcher that was killed may take to end
STEADY = 600.0  # a start that lived this long ends the row of failures


def supervise(plan: JobPlan) -> int:
    """Run a plan to its end, and return the exit status."""
    _announce(plan)
    try:
        if held := _held_by(plan):
            rule = f"checkpoint.dir: another run writes to {plan.resolved.config.checkpoint.dir} ({held})"
            log(f"{rule}: wait for its end, or give this one a run.dir of its own")
            return CONFIG_ERROR
        plan = tell_need(plan)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    allowed = 0 if plan.choice.wrapper.restarts else plan.launch.restarts
    attempt, in_a_row = 0, 0
    restarts = Restarts(allowed)
    while True:
        if plan.launch.compare and (stopped := _compare_hosts(plan)):
            return stopped
        result = start(plan, attempt)
        if result.status == 0:
            return 0
        _explain(plan, result)
        refusal = restarts.refusal(result)
        if refusal is not None:
            if refusal:
                log(refusal)
            _into_the_ledger(plan, result, attempt + 1, "given_up")
            _close(plan)
            return NO_PROGRESS if restarts.idle >= CYCLES and refusal else result.status
        attempt += 1
        restarts.done = attempt
        in_a_row = 1 if result.seconds > STEADY else in_a_row + 1
        delay = min(plan.launch.restart_delay * 2 ** (in_a_row - 1), LONGEST_DELAY)
        plan = _elsewhere(plan) if result.status == RERUN else _on_hosts_that_are_left(plan, result)
        log(f"restart {attempt} of {allowed} in {delay:.0f} s, from the newest intact checkpoint")
        _into_the_ledger(plan, result, attempt, "restart")
        try:
            pause(delay, _ledger(plan).parent, f"restart {attempt} of {allowed} after {describe_status(result.status)}")
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def _held_by(plan: JobPlan) -> str | None:
    """The process of another run that writes where this one would, as far as this machine sees it. Its ranks would be
    refused, but this launcher would have taken the place of the other in the run's folder by then."""
    if Path(plan.script).name != "train.py":
        return None
    folder, until = Path(plan.job.directory, plan.resolved.config.checkpoint.dir), time.monotonic() + LINGER
    while (held := holder(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    return held


def _compare_hosts(plan: JobPlan) -> int:
    """Name slow hosts, here and in the ledger. Returns the exit status if a signal came meanwhile, else 0. A host that
    does not answer is the next start's business."""
    from .doctor.doctor import Doctor

    choice = replace(plan.choice, hosts=(*plan.choice.hosts, *plan.choice.spares), spares=())
    log(f"comparing {len(choice.hosts)} hosts (launch.compare)")
    launch = plan.launch
    doctor = Doctor(choice, lambda job: choice.commands(job, launch), launch.python, launch.start_timeout, run=plan.job)
    found = doctor.compared()
    if doctor.signals:
        return 128 + doctor.signals[0]
    for each in found:
        log(f"warning: {each.check} of {', '.join(each.hosts)}: {each.value}", colour=YELLOW)
    path = _ledger(plan)
    if found and path.exists():  # a run that never began has none
        ledger = Ledger(path)
        ledger.write("compared", slow=[{"hosts": one.hosts, "check": one.check, "value": one.value} for one in found])
        ledger.close()
    return 0


def _on_hosts_that_are_left(plan: JobPlan, result: Result) -> JobPlan:
    """The plan with spare hosts in the places of lost ones. Without spares, the hosts that are left, if the layout
    allows it, otherwise all of them again."""
    lost = {each.host for each in result.failures if each.rank is None} or _faulty_hosts(plan, result)
    plan, taken = with_spares(plan, lost)
    for host, spare in taken.items():
        log(f"{spare}, a spare host, takes the place of {host}: the same ranks")
    lost -= set(taken)
    if not lost:
        return plan
    names = ", ".join(sorted(lost))
    try:
        smaller = without_hosts(plan, lost, os.environ)
    except (ConfigError, HostError) as error:
        log(f"cannot continue without {names}, so all hosts are tried again: {error}")
        return plan
    left = counted(smaller.choice.ranks, "rank")
    log(f"continuing without {names}: {left} in place of {plan.choice.ranks}, the same global batch")
    return smaller


def _elsewhere(plan: JobPlan) -> JobPlan:
    """The plan with every rank in another place: on the next host, or where there is one, in its next slot."""
    hosts = plan.choice.hosts
    if len(hosts) == 1:
        hosts = tuple(replace(host, slots=(*host.slots[1:], host.slots[0])) for host in hosts)
    elif plan.launch.master_address:
        log("launch.master_address is that of the first host: no rank moves")
    else:
        hosts = (*hosts[1:], hosts[0])
    return replace(plan, choice=replace(plan.choice, hosts=hosts), job=replace(plan.job, hosts=hosts))


def _faulty_hosts(plan: JobPlan, result: Result) -> set[str]:
    if result.status != CORRUPT:
        return set()
    try:
        told = [each for each in read_ledger(_ledger(plan)) if each["event"] in ("attribution", "resume", "start")]
        last = told[-1] if told and told[-1]["event"] == "attribution" else {}
        return {str(place).rpartition("/")[0] for place in last.get("places", ())}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _into_the_ledger(plan: JobPlan, result: Result, attempt: int, event: str) -> None:
    """Record the failure and its consequence, while no other process writes there."""
    first, path = result.first, _ledger(plan)
    # A run whose directory is on other machines keeps its ledger there, and one that never began has none.
    if first is None or not path.parent.is_dir() or (event == "given_up" and not path.exists()):
        return
    ledger = Ledger(path)
    ledger.write(
        event,
        attempt=attempt,
        status=result.status,
        rank=first.rank,
        host=first.host,
        reason=first.reason or first.disagreement or describe_status(first.status),
        code=code_now()[:16],
        hosts=[host.name for host in plan.choice.hosts],
        since=result.since,
        failed=first.since or first.time,
        ended=result.ended,
    )
    ledger.close()


def _ledger(plan: JobPlan) -> Path:
    return Path(plan.job.directory, plan.resolved.config.run.dir, "ledger.jsonl")


def _close(plan: JobPlan) -> None:
    """The wall time of a run that is given up, as far as its ledger can be read here."""
    try:
        account = goodput(read_ledger(_ledger(plan)))
    except (OSError, ValueError, KeyError, TypeError):
        return
    if account.wall:
        log(f"goodput {account.text()}")


def start(plan: JobPlan, attempt: int) -> Result:
    """One start of all ranks, with agents of its own and a port of its own."""
    job, todo = restarted(plan, attempt), commands(plan)
    if job.code != plan.job.code:
        log("the source code has changed since this run was started: what follows is computed by other code")
    # An agent on this machine reads the same files. An edit meanwhile is no difference between hosts.
    settings = plan.launch.model_copy(update={"check_code": plan.launch.check_code and not plan.choice.starter.here})
    if not any(each.dials for each in todo):
        return Launcher(job, todo, settings, hang=plan.hang).run()
    listener = AgentListener(network.towards([host.name for host in plan.choice.hosts], plan.launch.interface))
    files = [write_file(Path(each.credentials_file), listener.credentials()) for each in todo if each.credentials_file]
    todo = [replace(each, environment={**each.environment, VARIABLE: listener.credentials()}) for each in todo]
    try:
        return Launcher(job, todo, settings, listener, plan.hang).run()
    finally:
        listener.close()
        for file in files:
            file.unlink(missing_ok=True)


def _announce(plan: JobPlan) -> None:
    hosts = plan.choice.hosts
    where = hosts[0].name if len(hosts) == 1 else f"{len(hosts)} hosts ({hosts[0].name} ... {hosts[-1].name})"
    spares = ", ".join(host.name for host in plan.choice.spares)
    spare = f", and {spares} to spare" if spares else ""
    log(f"runner {plan.choice.runner} ({plan.choice.reason}): {counted(plan.choice.ranks, 'rank')} on {where}{spare}")
    log(f"logs in {plan.job.logs}")
    summary = replace(plan.resolved, warnings=()).summary(short=True)
    if summary:
        log(summary)
    if plan.resolved.warnings:
        log(list_problems(plan.resolved.warnings), colour=YELLOW)


def _explain(plan: JobPlan, result: Result) -> None:
    if result.first is None:
        log(f"stopped by a signal, exit status {result.status}")
        return
    others = [each for each in result.failures if each is not result.first]
    sys.stderr.write(report(result.first, others, result.seconds, plan.job.logs) + "\n")
    sys.stderr.flush()
