"""The installed command `deepy`: the verbs of deepy.py, of the scripts beside it and of tools/, under one name."""
