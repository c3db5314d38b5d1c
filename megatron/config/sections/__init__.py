"""The typed sections of a run's configuration. One file per question; see `megatron.config.schema.Config`."""
