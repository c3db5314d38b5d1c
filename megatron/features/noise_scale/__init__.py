"""The gradient noise scale, from the gradients of two batch sizes."""
