"""Reports of a run: metrics, the ledger, curves, the console."""
