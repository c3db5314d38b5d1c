"""Plans a job: hosts, runner, settings, batch scripts."""
