"""Many runs of one file: every combination of sizes, seeds, data and recipes, planned, trained and compared as one."""

from .members import Member, Suite, read_suite

__all__ = ["Member", "Suite", "read_suite"]
