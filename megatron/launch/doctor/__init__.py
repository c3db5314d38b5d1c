"""Checks of hosts and devices before a job."""
