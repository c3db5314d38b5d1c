"""The goldfish loss: some labels never count."""
