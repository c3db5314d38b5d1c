"""Rehearsals: the run's own program for chosen ranks, on tensors without values and process groups that send
nothing."""
