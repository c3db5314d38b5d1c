"""The messages of a run, predicted: operation, axis, elements and bytes of each."""
