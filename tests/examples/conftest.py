"""Fixtures of the training program, which the examples run in."""

from tests.trainer.conftest import fresh, trainer

__all__ = ["fresh", "trainer"]
