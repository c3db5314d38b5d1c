"""Names of user packages: extensions, additions, import paths."""
