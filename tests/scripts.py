"""Scripts of tools/ run as from a command line, but in this process: starting Python and its imports take a second.

For what tools say and write. That each starts by itself is seen in tests/command, and by those who start one.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import traceback
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from tests.paths import ROOT


def script(name: str, *words: object, folder: str | os.PathLike | None = None) -> CompletedProcess[str]:
    """What `python tools/NAME WORDS` prints and ends with.

    Args:
        folder: where it runs; the current one by default.
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
