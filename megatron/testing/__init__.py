"""Helpers for tests of new parts, built-in or in your own package, which must compute the same on every layout.

    from megatron.testing import check_counts, check_decoding, check_layouts

    def test_layouts():
        check_layouts(VALUES, [{"parallel": {"tensor": 2}}, {"parallel": {"pipeline": 2}}, {"zero": {"stage": 2}}])

`values` is a configuration as a nested dictionary, as `megatron.config.resolve` takes it. No GPU is needed: ranks are
gloo processes on this machine that are started once and reused. `train_on_ranks` is a whole run, to test an optimizer,
a schedule or a hook."""

from .checks import check_counts, check_decoding
from .layouts import check_layouts
from .ranks import on_ranks
from .runs import train_on_ranks

__all__ = ["check_counts", "check_decoding", "check_layouts", "on_ranks", "train_on_ranks"]
