"""How a step is made: all that knows DeepSpeed, and the optimizers, behind the protocol that the trainer uses."""
