"""The Python example of the documentation runs."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(examples) == 1
    exec(compile(examples[0], str(DOCUMENT), "exec"), {})
    assert (tmp_path / "checkpoints" / "step_00000010" / "manifest.json").exists()
