"""For the tests of what is added, inside or in a package of your own: it must compute the same on every layout.

    from megatron.testing import check_counts, check_decoding, check_layouts

    def test_layouts():
        check_layouts(VALUES, [{"parallel": {"tensor": 2}}, {"parallel": {"pipeline": 2}}, {"zero": {"stage": 2}}])

`values` is a configuration as a nested dictionary, as `megatron.config.resolve` takes it. No GPU is needed: ranks are
processes on this machine that talk over gloo, which are started once and used again. `train_on_ranks` is a whole run,
for the tests of an optimizer, a schedule or a hook.
"""

from .checks import check_counts, check_decoding
from .layouts import check_layouts
from .ranks import on_ranks
from .runs import train_on_ranks

__all__ = ["check_counts", "check_decoding", "check_layouts", "on_ranks", "train_on_ranks"]
