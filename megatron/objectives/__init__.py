"""What a model is trained for: which labels count, and what each costs. One file per objective."""
