"""What each host offers to credit, of `NEEDS`: refusals and the table in docs/other_trainers.md follow from it."""

from ..estimators.base import ENTROPIES, EXTERNAL, NEEDS
from ..scoring.access import DISTRIBUTIONS, MODEL
from .credit import OFFERED_BY_A_SERVICE

OFFERS = {
    "TRL": frozenset(NEEDS) - {EXTERNAL},
    "verl": OFFERED_BY_A_SERVICE | {ENTROPIES},
    "OpenRLHF": OFFERED_BY_A_SERVICE,
    "your loop, `InProcess` or `TrainingForward`": frozenset(NEEDS),
    "your loop, `LogprobService`": frozenset(NEEDS) - {DISTRIBUTIONS, MODEL},
}
"""By host, in a run that samples several completions of each prompt."""
