"""Rules of options that only GPUs have."""
