"""The installed command `deepy`: the verbs of deepy.py, of the other scripts and of tools/, under one name."""
