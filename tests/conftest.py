"""Settings of the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # the files that use it say so themselves
    pass
else:
    # A busy machine is slow, not wrong.
    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup` a file is a unit, since its tests share fixtures; tests/launch shares its hosts too."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.path.relative_to(HERE)
        item.add_marker(pytest.mark.xdist_group("launch" if file.parts[0] == "launch" else file.stem))
