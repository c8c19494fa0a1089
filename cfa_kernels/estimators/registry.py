"""List the estimators by name: a new one is a file in this folder and a line here."""

from .base import Estimator
from .entropy import Entropy
from .external import External
from .gradient import Gradient
from .masking import Masking
from .prefix_gain import PrefixGain
from .siblings import PrefixTreeValues, SiblingEdits

ESTIMATORS: dict[str, type[Estimator]] = {
    kind.name: kind
    for kind in (
        Masking,
        Gradient,
        PrefixGain,
        Entropy,
        PrefixTreeValues,
        SiblingEdits,
        External,
    )
}
