"""Scripts run as from a command line, without a start of Python, whose imports take seconds. They run in this process,
or in a fork of a process that has imported torch and DeepSpeed.

For what tools say and write. tests/command checks that each starts by itself, and so do the tests that start one.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import tempfile
import traceback
from multiprocessing import get_context
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from tests.paths import ROOT


def script(name: str, *words: object, folder: str | os.PathLike | None = None) -> CompletedProcess[str]:
    """Output and status of `python tools/NAME WORDS`.

    Args:
        folder: where it runs. The current one by default.
    """
    path, arguments = ROOT / "tools" / name, [str(word) for word in words]
    out, error, status = io.StringIO(), io.StringIO(), 0
    with contextlib.ExitStack() as place:
        place.enter_context(contextlib.redirect_stdout(out))
        place.enter_context(contextlib.redirect_stderr(error))
        place.enter_context(mock.patch.object(sys, "argv", [str(path), *arguments]))
        place.enter_context(mock.patch.object(sys, "path", [str(path.parent), *sys.path]))
        place.enter_context(contextlib.chdir(Path(folder or ".")))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                error.write(end.code + "\n")
        except Exception:
            error.write(traceback.format_exc())
            status = 1
    return CompletedProcess([sys.executable, str(path), *arguments], status, out.getvalue(), error.getvalue())


def forked(*words: object, folder: str | os.PathLike, **more: str) -> CompletedProcess[str]:
    """Output and status of `python WORDS` (a script, or -c and code), in a process of its own.

    Args:
        folder: where it runs.
        more: variables of its environment.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["megatron.engine.preload"])
    arguments = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as place:
        texts = [Path(place, name) for name in ("out", "error")]
        process = context.Process(target=_as_python, args=(arguments, os.fspath(folder), more, texts))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            process.join()
        status = process.exitcode
        return CompletedProcess([sys.executable, *arguments], status, *(each.read_text() for each in texts))


def _as_python(arguments: list[str], folder: str, more: dict[str, str], texts: list[Path]) -> None:
    for stream, path in zip((sys.stdout, sys.stderr), texts):
        stream.flush()
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.chdir(folder)
    os.environ.update(more)
    path = "" if arguments[0] == "-c" else str(Path(arguments[0]).parent)
    sys.path[:0] = [path, *filter(None, more.get("PYTHONPATH", "").split(os.pathsep))]
    if arguments[0] == "-c":
        exec(arguments[1], {"__name__": "__main__"})
        return
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
