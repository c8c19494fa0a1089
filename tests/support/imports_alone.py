"""What importing the library brings with it. Import this first of all in a process of its own."""

import sys
from multiprocessing.connection import Connection

import cfa_kernels
import cfa_kernels.integrations
import cfa_kernels.integrations.openrlhf  # noqa: F401

TRAINERS = [name for name in ("trl", "verl", "openrlhf", "ray") if name in sys.modules]


def report(connection: Connection) -> None:
    """Send the trainers that had been imported when this module was."""
    connection.send(TRAINERS)
