"""Mixture of experts, in the order of the forward pass: `router` scores, `choice` chooses, `permute` sorts tokens by
expert, `dispatch` brings them to where the experts are, `experts` compute, and the way back. `losses` and `balance`
keep the load even."""
