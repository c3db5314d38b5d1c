"""AdEMAMix."""
