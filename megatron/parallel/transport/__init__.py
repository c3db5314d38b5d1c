"""Other ways to send a sum: compressed, in levels, on chosen routes, through shared memory."""
