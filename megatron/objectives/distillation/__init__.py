"""Learning from a frozen teacher."""
