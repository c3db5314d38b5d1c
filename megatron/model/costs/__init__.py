"""Parameters, FLOPs, bytes and messages of a model, from its layers' own counts."""
