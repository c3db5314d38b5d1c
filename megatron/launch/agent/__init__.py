"""One agent per host: starts ranks and watches their processes."""
