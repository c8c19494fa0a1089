"""What hosts that give log-probs and keep their model elsewhere must make of one batch, and what they must refuse."""

import torch
from torch import Tensor

from cfa_kernels import CounterfactualConfig, counterfactual_credit
from cfa_kernels.integrations.credit import Draws, credited_advantages, token_entropies
from tests.support.tiny import PHRASES, tiny_model, tiny_tokenizer

PROMPTS = [[3, 4, 5]] * 3 + [[9, 5, 10, 7]] * 3
REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]

CREDIT = [
    {"units": "tokens", "outcome": "mean_logprob", "weights": "bilevel"},
    {"preselect": 0.5, "preselect_by": "prefix_gain", "normalize": "mean"},
    {"estimator": "prefix_gain", "control": "inverted"},
    {"estimator": "prefix_tree"},
    {"estimator": "prefix_tree", "control": "random"},
    {"estimator": "prefix_tree", "control": "inverted"},
    {"estimator": "sibling_edits"},
]
"""Each estimator by name with options of others among them; `entropy` only where the host has entropies."""

IMPOSSIBLE = [
    ({"estimator": "gradient"}, "estimator='gradient': it needs gradients"),
    ({"estimator": "gradient", "sigma": 0.1}, "estimator='gradient': it needs gradients"),
    ({"outcome": "last"}, "outcome='last': it needs distributions"),
    ({"outcome": "mean", "units": "tokens"}, "outcome='mean': it needs distributions"),
    ({"effect": "total"}, "effect='total': it needs the model"),
    ({"fill": "resampled"}, "fill='resampled': it needs the model"),
    ({"preselect": 0.5, "preselect_by": "gradient"}, "preselect_by='gradient': it needs gradients"),
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


def padded() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prompts and their mask, completions and theirs, as TRL lays them out."""
    prompts = torch.tensor([[0, *row] if len(row) == 3 else row for row in PROMPTS])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in completions()], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)).long() for row in completions()], batch_first=True)
    return prompts, (prompts != 0).long(), ids, mask


def credited(advantages: Tensor, options: dict[str, object], temperature: float = 1.0) -> Tensor:
    """(6, T) advantages of the batch with credit by the model itself; `advantages` are (6,)."""
    model, config, batch = tiny_model().eval(), CounterfactualConfig(**options), padded()
    entropies = token_entropies(model, *batch, temperature=temperature) if config.reads_entropies else None
    credit = counterfactual_credit(
        model,
        tiny_tokenizer(),
        *batch,
        advantages=advantages,
        config=config,
        generator=Draws(0).of(0),
        rewards=torch.tensor(REWARDS),
        entropies=entropies,
    )
    found = credited_advantages(advantages[:, None].expand(batch[2].shape), credit)
    assert not torch.equal(found, advantages[:, None].expand(found.shape)), "this credit does nothing"
    return found
