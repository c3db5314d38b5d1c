"""N-gram overlap of texts with token files: which of a set of examples a run reads, and when."""
