"""The gradient noise scale over a run: a quotient of means, since one step's estimate says little."""

from __future__ import annotations

from .history import RunHistory, Series

NOISE = "noise_scale"
RECENT = 100  # estimates of the moving mean


def noise_scales(run: RunHistory, count: int | None) -> Series:
    """Mean noise over mean signal of the last `count` estimates, or of all so far; where both are above 0."""
    noise, signal = run.metric(f"{NOISE}/noise"), run.metric(f"{NOISE}/signal")
    known, sums, found = dict(zip(signal.steps, signal.values)), [(0.0, 0.0)], Series()
    for step, value in zip(noise.steps, noise.values):
        if step not in known:
            continue
        above, below = sums[-1]
        sums.append((above + value, below + known[step]))
        first = sums[0 if count is None else max(len(sums) - 1 - count, 0)]
        above, below = sums[-1][0] - first[0], sums[-1][1] - first[1]
        if above > 0 and below > 0:
            found.add(step, above / below)
    return found
