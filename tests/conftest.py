"""Settings of the whole suite."""

from __future__ import annotations

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # the files that use it say so themselves
    pass
else:
    # A busy machine is slow, not wrong.
    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")
