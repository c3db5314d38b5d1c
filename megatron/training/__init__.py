"""How a run learns: the loop, its hooks, schedules, and where a run starts."""
