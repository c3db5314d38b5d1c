"""A headless Chromium that opens a page and returns its content."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
]


def opened(page: Path, *, script: str = "", picture: Path | None = None, size: tuple[int, int] = (1200, 1600)) -> str:
    """The document of a page as HTML after its scripts have run. Open shadow roots are not in it.

    Args:
        script: JavaScript that runs two seconds after the page was loaded. Its changes of the document are in the
        result. picture: where a picture of the page goes.
    """
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"needs one of {', '.join(NAMES)}")
    if script:
        text = page.read_text(encoding="utf-8")
        page = page.with_name(f"scripted_{page.name}")
        head, end, tail = text.rpartition("</body>")
        page.write_text(f"{head}<script>setTimeout(() => {{{script}}}, 2000)</script>{end}{tail}", encoding="utf-8")
    profile = page.parent / "profile"
    options = [
        *QUIET,
        f"--user-data-dir={profile}",
        f"--window-size={size[0]},{size[1]}",
        "--virtual-time-budget=60000",
    ]
    wanted = ["--dump-dom"] if picture is None else [f"--screenshot={picture}"]
    done = subprocess.run(
        [program, *options, *wanted, page.absolute().as_uri()], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
