"""Sources of a configuration: YAML, overrides, merging, and the place of every value."""
