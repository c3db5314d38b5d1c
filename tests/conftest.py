"""Settings of the whole suite."""

from __future__ import annotations

import gc
import getpass
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests import selection
from tests.selection import pytest_collection_modifyitems, pytest_runtest_setup, pytest_terminal_summary  # noqa: F401

sys.path.append(str(Path(__file__).parent / "stand_ins"))  # a real package comes before them
sys.path.append(str(Path(__file__).parent.parent / "examples" / "optimizers"))

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # the files that use it say so themselves
    pass
else:
    # A busy machine is slow, not wrong.
    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")


def pytest_addoption(parser) -> None:
    selection.add_options(parser)
    parser.addoption("--margins", metavar="FILE", help="record how near comparisons come to their bounds")


def pytest_configure(config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script: tests send it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("COLUMNS", "LINES"):  # xdist gives its workers the size of a terminal, which what they start believes
        os.environ.pop(name, None)
    # Hundreds of processes are started: without bytecode each would compile the project again, a second of its time.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
        # inductor takes what it has compiled for other instructions from its cache, which then fails or gives nan
        folder = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{capability}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # Two kernels at a time would need a pool of processes that import torch: more work on busy cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if "XDG_STATE_HOME" not in os.environ:  # runs of tests correct no user's predictions
        folder = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))
    forkserver.set_forkserver_preload = preload
    selection.configure(config)
    if path := config.getoption("--margins"):
        from tests import margins

        margins.start(path)


def preload(names: Sequence[str]) -> None:
    """Modules of the process that ranks, rehearsals and scripts are forked from. There is one for all of a process's
    tests. The first of them starts it, and a module that it lacks is imported again by each process of the others.
    """
    from megatron.config.kind import kinds_of
    from megatron.rehearsal.command import PRELOADED

    kinds = {kind.layer.partition(":")[0] for kind in kinds_of().values()}
    forkserver._forkserver.set_forkserver_preload([*names, *sorted(kinds), *PRELOADED])


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """No garbage is searched while hundreds of modules are imported, nor later in their objects: seconds each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
