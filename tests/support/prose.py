"""Pieces of a sentence that the tests of README and docs read alike."""

import re

CODE_NUMBER = re.compile(r"`([-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?: ?%)?)`")
"""A bare number in code marks, which is a figure: a setting is named with its value, `top_p=0.95`."""
