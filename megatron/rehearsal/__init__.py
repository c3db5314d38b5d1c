"""Does it fit? The run's own program for chosen ranks, on tensors that have no values and groups that send nothing."""
