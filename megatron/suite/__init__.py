"""Many runs of one file: every combination of sizes, seeds, data and recipes, planned, trained and compared as one."""
