"""How a run learns: the loop, its hooks, the engine, optimizers and schedules."""
