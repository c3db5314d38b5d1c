"""An optimizer whose package is not installed is refused before a rank starts, and said to be so."""

from __future__ import annotations

import pytest

from megatron.config.rules import recipe
from tests.config.broken.case import BASE
from tools.config import main


@pytest.mark.parametrize("there", [True, False])
def test_a_missing_package_is_named(there, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "has_file", lambda package, file: there)
    (tmp_path / "a.yml").write_text(BASE)
    status = main(["check", str(tmp_path / "a.yml"), "--ranks", "1", "optimizer.type=adamw_8bit"])
    assert status == (0 if there else 2)
    message = capsys.readouterr().err
    assert there or ("adamw_8bit needs torchao" in message and "pip install torchao" in message)
