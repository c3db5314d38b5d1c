"""Mixture of experts. In the order of the forward pass, `router` scores, `choice` chooses and `permute` sorts tokens by
expert. `dispatch` brings them to where the experts are, `experts` compute, and `dispatch` brings the results back.
`losses` and `balance` keep the load even."""
