"""What credit finds and what it is good for; README.md says how to run it."""
