"""The typed sections of a run's configuration. One file per topic, for `megatron.config.schema.Config`."""
