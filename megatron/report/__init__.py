"""What a run tells: metrics, the ledger, curves, the console."""
