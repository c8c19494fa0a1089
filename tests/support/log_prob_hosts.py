"""What hosts that give log-probs and keep their model elsewhere must make of one batch, and what they must refuse."""

import torch
from torch import Tensor

from cfa_kernels import Batch, BatchKeys, CounterfactualConfig, DeferredCredit, Rows, pad_rows
from tests.support.plug_ins import TOTAL_EFFECTS
from tests.support.tiny import PHRASES, tiny_model, tiny_tokenizer

PROMPTS = [[3, 4, 5]] * 3 + [[9, 5, 10, 7]] * 3
REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]

CREDIT = [
    {"units": "tokens", "estimator.outcome": "mean_logprob", "weights": "bilevel"},
    {"estimator.preselect": 0.5, "estimator.preselect_by": "prefix_gain", "normalize": "mean"},
    {"estimator": "prefix_gain", "control": "inverted"},
    {"units": "turns", "estimator.mask_observation": True},
    {"estimator": "prefix_gain", "completions": "positive", "normalize": "mean", "open_spans": True},
    {"estimator": "prefix_tree"}, {"estimator": "prefix_tree", "control": "random"},
    {"estimator": "prefix_tree", "control": "inverted"}, {"estimator": "sibling_edits"},
]  # fmt: skip
"""Each estimator by name with options of others among them; `entropy` only where the host has entropies."""

IMPOSSIBLE = [
    ({"estimator": "gradient"}, "estimator='gradient': it needs gradients"),
    ({"estimator": "gradient", "estimator.sigma": 0.1}, "estimator='gradient': it needs gradients"),
    ({"estimator.outcome": "last"}, "outcome='last': it needs distributions"),
    ({"estimator.outcome": "mean", "units": "tokens"}, "outcome='mean': it needs distributions"),
    (TOTAL_EFFECTS, "estimator='total_effects': it needs the model"),
    ({"estimator.preselect": 0.5, "estimator.preselect_by": "gradient"}, "preselect_by='gradient': it needs gradients"),
    ({"estimator": "external"}, "estimator='external': it needs importances that the caller passes in"),
    ({"estimator": "prefix_tree", "control": "random"}, None),
    ({"estimator": "gradient", "control": "random"}, None),
    ({"estimator": "external", "control": "off"}, None),
]
"""Options, and how their refusal begins; None where no estimator runs, or one that can."""


def completions() -> list[list[int]]:
    vocabulary = tiny_tokenizer().get_vocab()
    a, b, c, d, seven, five = (vocabulary[phrase] for phrase in PHRASES)
    return [[a, b, c, seven, 1], [a, c, d, b, five, 1], [b, d], [d, a, five], [a, b, d, seven], [c, a, b, b, seven, 1]]


def batch_rows() -> Rows:
    return Rows([torch.tensor(row) for row in PROMPTS], [torch.tensor(row) for row in completions()])


def batch_mask() -> list[Tensor]:
    """1 on what the policy wrote; one token is a tool's."""
    masks = [torch.ones(len(row)) for row in completions()]
    masks[1][1] = 0
    return masks


def credited(advantages: Tensor, options: dict[str, object], temperature: float = 1.0) -> Tensor:
    """(6, T) advantages of the batch with credit by the model itself, 0 on padding; `advantages` are (6,)."""
    model, config, rows = tiny_model().eval(), CounterfactualConfig.of(options), batch_rows()
    batch = Batch(rows, advantages=advantages, rewards=torch.tensor(REWARDS), mask=batch_mask())
    deferred = DeferredCredit(config, tiny_tokenizer(), batch, seed=BatchKeys(0).key(0), temperature=temperature)
    deferred.by_model(model)
    found = deferred.credited(range(6))
    assert not isinstance(found, Tensor), "this credit does nothing"
    return pad_rows(found)
