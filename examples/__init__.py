"""Modules to load by `module:name`, and scripts to read and run."""
