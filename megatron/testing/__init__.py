"""For the tests of a kind of layer, inside or in a package of your own: it must compute the same on every layout.

    from megatron.testing import check_counts, check_decoding, check_layouts

    def test_layouts():
        check_layouts(VALUES, [{"parallel": {"tensor": 2}}, {"parallel": {"pipeline": 2}}, {"zero": {"stage": 2}}])

`values` is a configuration as a nested dictionary, as `megatron.config.resolve` takes it. No GPU is needed: ranks are
processes on this machine that talk over gloo.
"""

from .checks import check_counts, check_decoding
from .layouts import check_layouts

__all__ = ["check_counts", "check_decoding", "check_layouts"]
