"""The launcher: starts agents, follows a job, decides on restarts."""
