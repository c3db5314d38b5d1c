"""Status of a job, and its lines on the console."""
