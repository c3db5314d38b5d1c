"""The files of a checkpoint: fragments, tables, index, manifest."""
