"""An objective that reads logits: smoothed labels and a reward for entropy."""
