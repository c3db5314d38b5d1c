"""Where a run starts: fresh, resumed, forked, or from another model's weights."""
