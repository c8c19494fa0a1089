"""A source for ledgers in tests."""

SOURCE = {
    "commit": "abc", "dirty": False, "code": "c0de", "versions": {"torch": "2"}, "processor": "one", "threads": 1,
    "command": "a command",
}  # fmt: skip
