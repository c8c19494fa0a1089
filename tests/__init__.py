"""The test suite; folders mirror the package."""
