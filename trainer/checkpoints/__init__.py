"""Keep a run so that the same command resumes it, however it ended."""
