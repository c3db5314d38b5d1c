"""Multi-head latent attention: keys and values of all heads from one short vector per token."""
