"""Where a run's processes start: hosts, one agent per host, and one runner per way of starting them.

This folder imports neither torch nor deepspeed: the launcher must start in a fraction of a second."""
