"""Which training sequences a checkpoint can recite."""
