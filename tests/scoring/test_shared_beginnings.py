"""Rows that share a beginning, at any depth: log-probs, losses, scores and gradients are those of rows fed apart."""

import pytest
import torch

from cfa_kernels.rows import Rows, fed_together
from cfa_kernels.scoring.packed import packed_forward, packed_policy_loss
from tests.support.models import (
    HYBRIDS,
    OTHERS,
    assert_same_gradients,
    at_least_float32,
    float64_throughout,
    gradients,
    make_model,
    plain_logprobs,
    tokens,
)
from tests.support.small_tokenizers import encode, get_tokenizer

CHARACTERS = get_tokenizer("characters")


def ids(text: str) -> torch.Tensor:
    return torch.tensor(encode(CHARACTERS, text))


def joined(*parts: tuple[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask of parts of text."""
    texts = [ids(text) for text, _ in parts]
    return torch.cat(texts), torch.cat([torch.full((len(t),), w) for t, (_, w) in zip(texts, parts, strict=True)])


SYSTEM = "Be exact. "
START = (("look 1+1. ", 1), ("[2] ", 0), ("then 2*3. ", 1), ("[6] ", 0))
TURNS = [
    # A rollout of three rows: it goes on, a part of it is sampled again, it is rewritten with a summary.
    (SYSTEM + "What?", (*START, ("so\n#### 6", 1))),
    (SYSTEM + "What?", (*START[:2], ("add 2+4. ", 1), ("[6] ", 0), ("#### 6", 1))),
    (SYSTEM + "Summary: 2*3 is next. ", (("2*3 is 6.\n", 1), ("[ok] ", 0), ("#### 6", 1))),
    (SYSTEM + "What?", (("guess 1+2. ", 1), ("[3] ", 0), ("#### 3", 1))),
    # The prompt of this trace holds what the policy wrote in the other.
    (SYSTEM + "What?guess 1+2. [3] ", (("or 1+3. ", 1), ("[4] ", 0), ("#### 4", 1))),
]  # fmt: skip
PROMPTS = [ids(prompt) for prompt, _ in TURNS]
COMPLETIONS, MASKS = map(list, zip(*(joined(*parts) for _, parts in TURNS), strict=True))
ROWS = Rows(PROMPTS, COMPLETIONS)
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5])


DELTA_NETS = ["Qwen3Next", "Qwen3_5Text"]
MODELS = ["Qwen3", "Gemma3Text", "DeepseekV3", *(name for name in HYBRIDS if name not in DELTA_NETS)]


def model_of(name: str, **changes):
    """A small model, whose window, if it has one, is one of every version of transformers."""
    model = make_model(name, **(OTHERS | HYBRIDS).get(name, {}), **changes)
    if name == "Gemma3Text":
        model.set_attn_implementation("eager")
    return model


def loss_of_plain_rows(model, weights) -> torch.Tensor:
    """The on-policy loss, -A w, of rows that each take a forward of their own, summed over tokens of the policy."""
    total = 0.0
    for b, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        whole = torch.cat([prompt, completion]).to(model.device)
        logits = at_least_float32(model(input_ids=whole[None]).logits[0])
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, whole[len(prompt) :, None])[:, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        total = total - (ratio * ADVANTAGES[b] * (weights[b] * MASKS[b]).to(ratio)).sum()
    return total / sum(int(mask.sum()) for mask in MASKS)


def assert_the_loss_is_that_of_plain_rows(model, budget=None):
    weights = [torch.rand(n, generator=torch.Generator().manual_seed(n)) * 3 for n in ROWS.lengths]
    options = {"weights": weights, "mask": MASKS, "loss_type": "dapo", "token_budget": budget}
    ours = packed_policy_loss(model, ROWS, advantages=ADVANTAGES, **options).loss
    theirs = loss_of_plain_rows(model, weights)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert_same_gradients(gradients(model, ours), gradients(model, theirs))


@pytest.mark.parametrize(("name", "budget"), [*((name, None) for name in MODELS), ("Qwen3", 1), ("Bamba", 1)])
def test_gradients_of_rows_that_share_prefixes_are_those_of_rows_fed_apart(name, budget):
    assert_the_loss_is_that_of_plain_rows(model_of(name, vocab_size=128), budget)


def forks(*lengths: int) -> Rows:
    """Rows of one rollout that leave a trunk after each of its pieces, the last one at its end."""
    pieces, ends = tokens(*lengths, seed=2), tokens(*(1 + n % 5 for n in range(len(lengths))), seed=3)
    trunk = [torch.cat(pieces[: k + 1]) for k in range(len(pieces))]
    completions = [torch.cat([own, end]) for own, end in zip(trunk, ends, strict=True)]
    return Rows([tokens(5)[0]] * len(lengths), completions)


def distinct(rows: Rows) -> int:
    """Prefixes that differ: what is to be fed."""
    return len({tuple(rows.whole(b)[:n].tolist()) for b in range(len(rows)) for n in range(1, len(rows.whole(b)))})


def assert_forks_train_as_plain_rows(model, *lengths):
    """With each token of what they share fed once."""
    rows = forks(*lengths)
    forward = packed_forward(model, rows)
    assert forward.tokens_fed == distinct(rows)
    ours, theirs = forward.logprobs(), plain_logprobs(model, rows.prompts, rows.completions)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5, check_dtype=False)
    factors = [torch.rand(n, generator=torch.Generator().manual_seed(n)) - 0.3 for n in rows.lengths]
    found, expected = (
        gradients(model, sum((line * factor.to(line)).sum() for line, factor in zip(lines, factors, strict=True)))
        for lines in (ours, theirs)
    )
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_so_they_are_six_turns_deep(name):
    """With turns of one token, of as many as the 8 of a chunk of Mamba's here, and more."""
    assert_forks_train_as_plain_rows(model_of(name), 3, 1, 8, 9, 2, 16)


@pytest.mark.parametrize("name", DELTA_NETS)
def test_so_they_are_in_gated_delta_nets_which_lose_a_thousandth_in_float32_shared_or_not(name, unchecked):
    """With turns of one token, and of as many as the 64 of a chunk, and more."""
    with float64_throughout(model_of(name)) as model:
        assert_forks_train_as_plain_rows(model, 3, 1, 64, 65, 2)
    with float64_throughout(model_of(name, vocab_size=128)) as model:
        assert_the_loss_is_that_of_plain_rows(model)


def test_what_rows_share_is_fed_once_whatever_their_prompts_and_the_budget():
    assert fed_together(ROWS) == [0, 0, 1, 0, 0]  # the last prompt goes on as the completion before it begins
    model = make_model("Qwen3", vocab_size=128)
    assert packed_forward(model, ROWS).tokens_fed == distinct(ROWS)
    together, other = ROWS.take([0, 1, 3, 4]), ROWS.take([2])
    fed = packed_forward(model, ROWS, token_budget=1).tokens_fed
    assert fed == distinct(together) + distinct(other)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (["ab", "ab", "b"], [0, 0, 1]),
        (["ab", "abx", "abxyz", "abz"], [0, 0, 0, 1]),  # a later turn goes on as a completion begins
        (["abxyz", "b", "abx", "ab"], [0, 1, 0, 0]),  # in any order
    ],
)
def test_rows_are_fed_side_by_side_whose_prompts_go_on_as_a_completion_begins(prompts, expected):
    completions = [ids("xy" if prompt.endswith(("b", "z")) else "yz") for prompt in prompts]
    assert fed_together(Rows([*map(ids, prompts)], completions)) == expected
