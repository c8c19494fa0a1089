"""Score centering: loss and gradients are those of the definition, and its refusals."""

import math

import pytest
import torch

from cfa_kernels.loss.policy import linear_policy_loss, policy_loss
from cfa_kernels.ops.kept_tokens import KeptTokens
from tests.support.kept_tokens import TRANSFORMS, B, H, T, dense_rows, example, leaves_of

MASK = torch.arange(T) < torch.tensor([5, 2, 4])[:, None]
ADVANTAGES = torch.tensor([1.0, -0.7, 0.4])
BAND = {"sampling_clip_min": 0.6, "sampling_clip_max": 1.4}
LOSSES = {  # options, and the column that holds the sampler's log-probs, if there is one
    "reinforce": ({}, None),
    "dppo": ({"epsilon": 0.05, "epsilon_high": 0.08, "delta": 1.5}, "old_logprobs"),
    "cispo": ({"epsilon_high": 1.2}, "old_logprobs"),
    "dapo": ({"epsilon": 0.3, "epsilon_high": 0.4, "delta": 1.5, "beta": 0.1}, "old_logprobs"),
    "sapo": ({}, "old_logprobs"),
    "bnpo": ({"sampling_mode": "token_mask", **BAND}, "sampling_logprobs"),
    "grpo": ({"sampling_mode": "token_truncate", **BAND}, "sampling_logprobs"),
}


class Problem:
    """Tokens that another policy, near the one that trains, drew from the ids that it kept."""

    def __init__(self, kind, dtype, device, **transform):
        *tensors, self.options, lists = example(kind, dtype, device, **transform or TRANSFORMS[1])
        self.hidden, self.head, self.targets = tensors
        self.lists = [list(dict.fromkeys(ids)) for ids in lists]
        noise = torch.randn(self.hidden.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        near = self.hidden.double() + 0.4 * noise.to(device)
        self.sampled = dense_rows(near, self.head, self.lists, torch.float64, **self.options)
        rows = zip(self.sampled.cpu(), self.lists, strict=True)
        rows = [row[ids] for row, ids in rows]
        rows[8] = rows[8] * torch.nan  # that the mask does not count
        self.kept = KeptTokens.of(self.lists, rows)
        self.weights = torch.linspace(0, 2, B * T, dtype=torch.float64, device=device).view(B, T)
        self.mask, self.advantages = MASK.to(device), ADVANTAGES.to(device)

    def columns(self, targets, column, **options):
        """Arguments of a loss had the sampler drawn `targets`."""
        own = self.sampled.gather(1, targets[:, None]).view(B, T)
        columns = {"weights": self.weights, "sampling_logprobs": own if column == "sampling_logprobs" else None}
        if options.get("beta"):
            columns["ref_logprobs"] = own - 0.3
        return (own if column == "old_logprobs" else None, self.advantages, self.mask), {**columns, **options}

    def centred(self, logp, loss_type):
        """The loss less its expectation over what the sampler could have drawn, id by id."""
        options, column = LOSSES[loss_type]

        def loss(targets, weighted, **others):
            arguments, columns = self.columns(targets, column, loss_type=loss_type, **options | others)
            columns["weights"] = columns["weights"] * weighted.view(B, T)
            return policy_loss(logp.gather(1, targets[:, None]).view(B, T), *arguments, **columns)[0]

        total = loss(self.targets, torch.ones_like(self.weights))
        for k in range(max(map(len, self.lists))):
            ids = torch.tensor([(ids + ids[:1] * k)[k] for ids in self.lists], device=logp.device)
            there = torch.tensor([k < len(ids) for ids in self.lists], device=logp.device)
            total = total - loss(ids, there * self.sampled.gather(1, ids[:, None])[:, 0].exp(), beta=0.0)
        return total


@pytest.mark.parametrize(
    ("backend", "kind", "loss_type"),
    [
        *(("torch", kind, loss_type) for kind in ("narrow", "wide") for loss_type in LOSSES),
        *(("triton", "narrow", loss_type) for loss_type in ("reinforce", "dapo", "bnpo")),
    ],
)
def test_the_loss_is_without_what_the_sampler_expects_of_it(backend, kind, loss_type, device, poisoned_memory):
    dtype = torch.float64 if backend == "torch" else torch.float32
    problem, results = Problem(kind, dtype, device), []
    options, column = LOSSES[loss_type]
    for form in ("ours", "plain"):
        leaves, own = leaves_of(
            problem.hidden, problem.head, problem.options, dtype if form == "ours" else torch.float64
        )
        if form == "ours":
            arguments, columns = problem.columns(problem.targets, column, loss_type=loss_type, **options)
            for chunk in (4, 64) if backend == "torch" else (4,):
                loss, _ = linear_policy_loss(
                    leaves[0].view(B, T, H), leaves[1], problem.targets.view(B, T), *arguments, **columns, **own,
                    kept_tokens=problem.kept, score_centering=True, chunk_size=chunk, drop_inactive=chunk == 4,
                    backend=backend,
                )  # fmt: skip
                loss.backward()
        else:
            loss = problem.centred(dense_rows(*leaves[:2], problem.lists, torch.float64, **own), loss_type)
            ((2 if backend == "torch" else 1) * loss).backward()
        of_logprobs = loss_type in ("reinforce", "dppo", "cispo")  # the losses that are log-probs times a constant
        results.append([*([loss.detach()] if of_logprobs else []), *(leaf.grad for leaf in leaves)])
    tolerance = {"rtol": 1e-10, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(*results, check_dtype=False, **tolerance)


def test_a_centred_loss_has_one_value_with_gradients_and_in_inference_mode():
    problem, values = Problem("narrow", torch.float64, "cpu"), []
    arguments, columns = problem.columns(problem.targets, "old_logprobs", loss_type="dapo", **LOSSES["dapo"][0])
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            hidden = problem.hidden.detach().view(B, T, H).requires_grad_(torch.is_grad_enabled())
            arguments_of_one = hidden, problem.head, problem.targets.view(B, T), *arguments
            values.append(
                linear_policy_loss(
                    *arguments_of_one, kept_tokens=problem.kept, score_centering=True, **columns, **problem.options
                )[0].item()
            )
    assert values[0] == pytest.approx(values[1], rel=1e-12)


IDS = [[1, 2], [3], [5, 0, 4]]
LOGPROBS = [[-0.5, math.log(1 - math.exp(-0.5))], [0.0], [-1.0, -2.0, math.log(1 - math.exp(-1) - math.exp(-2))]]


def edited(n, values):
    return KeptTokens.of(IDS, [*LOGPROBS[:n], values, *LOGPROBS[n + 1 :]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept_tokens": None}, "score_centering needs kept_tokens with the sampler's logprobs of the ids, got None"),
        ({"kept_tokens": KeptTokens.of(IDS)}, "the sampler's logprobs of the ids, got ids without logprobs"),
        ({"kept_tokens": KeptTokens.of([*IDS[:2], []], [*LOGPROBS[:2], []])},
         "row 0, token 2: score_centering needs probabilities that sum to 1 .* got 0 over 0 ids"),
        ({"kept_tokens": edited(0, [-0.5, -3.0])}, "row 0, token 0: .* sum to 1 .* got 0.656318 over 2 ids"),
        ({"kept_tokens": edited(1, [math.nan])}, "row 0, token 1: .* got nan over 1 ids"),
        ({"old_logprobs": [[-0.5, -0.1, -1.0]]}, "row 0, token 1: .* old_logprobs must be .* kept_tokens, 0, got -0.1"),
        ({"sampling_logprobs": [[-0.7, 0.0, -1.0]]}, "row 0, token 0: .* sampling_logprobs must be .* -0.5, got -0.7"),
        ({"importance_sampling_level": "sequence_token"}, "score_centering needs importance_sampling_level='token'"),
        ({"loss_type": "vespo"}, "another loss_type than vespo"),
        ({"sampling_logprobs": [[-0.5, 0.0, -1.0]], "sampling_mode": "geometric_mask", "sampling_clip_max": 2.0},
         "no sampling_mode or mask of sequences"),
    ],
)  # fmt: skip
def test_what_cannot_be_centred_is_refused_by_row_token_and_value(change, message):
    def loss(**change):
        change = {"kept_tokens": edited(0, LOGPROBS[0])} | change
        change = {name: torch.tensor(own) if isinstance(own, list) else own for name, own in change.items()}
        arguments = torch.zeros(1, 3, 4), torch.zeros(9, 4), torch.tensor([[1, 3, 5]])
        arguments += (change.pop("old_logprobs", None),)
        return linear_policy_loss(*arguments, torch.ones(1), torch.ones(1, 3), score_centering=True, **change)[0]

    assert loss(old_logprobs=[[-0.5, 0.0, -1.0]]).isfinite()
    with pytest.raises(ValueError, match=message):
        loss(**change)


def test_log_probs_stay_with_their_ids():
    whole = edited(0, LOGPROBS[0])
    parts = [whole.take(slice(0, 1)), KeptTokens.of([[]]), whole.take(torch.tensor([2, 1]))]
    expected = KeptTokens.of([IDS[0], [], IDS[2], IDS[1]], [LOGPROBS[0], [], LOGPROBS[2], LOGPROBS[1]])
    assert all(map(torch.equal, KeptTokens.joined(parts), expected))
    assert KeptTokens.joined([whole, KeptTokens.of(IDS)]).logprobs is None
