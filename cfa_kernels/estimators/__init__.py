"""Estimators of importance: how much a unit matters.

Modules here know `Batch` and `ModelAccess`. A new estimator is one file and one line below.
"""

from .base import ESTIMATORS
from .entropy import Entropy, EntropyShaping
from .external import External
from .gradient import Gradient
from .masking import Masking
from .prefix_gain import PrefixGain
from .progress import Progress
from .siblings import PrefixTreeValues, SiblingEdits

for kind in (
    Masking, Gradient, PrefixGain, Progress, Entropy, EntropyShaping, PrefixTreeValues, SiblingEdits, External,
):  # fmt: skip
    ESTIMATORS[kind.name] = kind
