"""Sampling: keyed draws, the nucleus, ends of completions, and logits that are not finite."""

import functools

import pytest
import torch

from cfa_kernels.ops.block_sums import block_sums
from tests.support.adapted import tokenizer
from tests.support.embedded import sample
from trainer.rollouts import sampling
from trainer.rollouts.engine import Rollouts
from trainer.rollouts.sampling import CANDIDATES, TokenDraw, draw


def test_a_sampled_completion_does_not_depend_on_the_rest_of_the_batch(trainer, rollouts) -> None:
    alone = sample(trainer, [2])
    assert alone.texts == rollouts.texts[16:24]
    assert len(set(alone.texts)) > 1


def by_sorting(scores: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Tokens (B, 1) as `draw` draws them, by its definition: in float64, with a sort of the vocabulary."""
    scores = (scores / temperature).double()
    if top_p < 1:
        values, order = scores.sort(dim=-1, stable=True)
        left_out = values.softmax(-1).cumsum(-1) <= 1 - top_p
        left_out[:, -1] = False
        scores = scores.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), -torch.inf)
    cumulative = scores.softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


def rows(kind: str, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(50, size, generator=generator)
    impossible = torch.randperm(size, generator=generator)[: size // 2]
    return {
        "peaked": lambda: scores * 8,
        "flat": lambda: scores * 0.3,
        "with ties": lambda: (scores * 2).round() / 2,
        "all alike": lambda: torch.full_like(scores, 1.5),
        "half impossible": lambda: scores.index_fill(1, impossible, -torch.inf),
        "all but few impossible": lambda: scores.masked_fill(torch.arange(size) % 171 != 37, -torch.inf),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("peaked", 301), ("flat", 7), ("flat", 5003), ("with ties", 2003), ("all alike", 2003),
        ("half impossible", 301), ("peaked", 17_003), ("with ties", 17_003), ("all but few impossible", 17_003),
    ],
)  # fmt: skip
def test_the_same_draws_give_the_tokens_that_a_sort_in_float64_gives(kind, size) -> None:
    scores = rows(kind, size)
    uniforms = torch.rand(len(scores), 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    differ = total = 0
    for temperature in (0.05, 0.6, 3.0):
        for top_p in (1e-6, 0.3, 0.95, 1.0):
            picked, logprobs, _, kept = draw(scores.clone(), uniforms, temperature, top_p)
            differ += int((picked != by_sorting(scores, uniforms, temperature, top_p)).sum())
            total += len(scores)
            inside = torch.zeros(len(scores), size + 1, dtype=torch.bool)
            if top_p < 1:
                ids, sampled = kept[:, 0].long(), kept[:, 1].view(torch.float32)
                inside = inside.scatter_(1, ids % (size + 1), True)[:, :size]
            else:
                inside = ~inside[:, :size]
            logp = torch.log_softmax((scores / temperature).double(), -1)
            mass = torch.where(inside, logp.double().exp(), 0).sum(1, keepdim=True)
            assert (mass >= top_p - 1e-6).all()  # and it is the smallest: without its least likely id it is too little
            least = logp.masked_fill(~inside, torch.inf).amin(1, keepdim=True).double().exp()
            assert (mass - least < top_p + 1e-6).all()
            torch.testing.assert_close(logprobs.double(), logp.gather(1, picked) - mass.log(), rtol=1e-5, atol=1e-5)
            assert inside.gather(1, picked).all()
            everywhere = draw(scores, uniforms, temperature, top_p, candidates=size)
            few = draw(scores, uniforms, temperature, top_p, candidates=CANDIDATES)
            assert torch.equal(everywhere.tokens, picked)
            assert everywhere.held.all()
            if top_p < 1:
                rows_of_both = zip(everywhere.kept[:, 0], kept[:, 0], strict=True)
                assert all({*a.tolist(), -1} == {*b.tolist(), -1} for a, b in rows_of_both)
                own = (logp.double() - mass.log()).gather(1, ids.clamp(min=0))[ids >= 0]
                torch.testing.assert_close(sampled[ids >= 0].double(), own, rtol=1e-5, atol=1e-5)
            assert torch.equal(few.tokens[few.held], picked[few.held])
    assert differ <= total / 900  # a nucleus whose edge is nearer to top_p than float32 tells apart


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_the_kernel_gives_the_draws_of_pytorch(top_p, device, monkeypatch) -> None:
    scores = torch.cat([rows(kind, 17_003)[:8] for kind in ("peaked", "with ties", "all but few impossible")])
    scores[0, 5], scores[1], scores[2, -1] = torch.nan, -torch.inf, torch.inf
    uniforms = torch.rand(len(scores), 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = draw(scores, uniforms, 0.8, top_p, CANDIDATES)
    monkeypatch.setattr(sampling, "block_sums", functools.partial(block_sums, backend="triton"))
    there = draw(scores.to(device), uniforms.to(device), 0.8, top_p, CANDIDATES)
    drawn = TokenDraw(*(part if part is None else part.cpu() for part in there))
    assert torch.equal(drawn.logprobs.isnan(), torch.arange(len(scores))[:, None] < 3)
    for ours, theirs in ((drawn.tokens, expected.tokens), (drawn.held, expected.held)):
        assert torch.equal(ours[3:], theirs[3:])
    if top_p < 1:
        assert torch.equal(drawn.kept[3:, 0], expected.kept[3:, 0])
    torch.testing.assert_close(drawn.logprobs, expected.logprobs, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_completion_counts_up_to_its_first_end_even_where_padding_is_the_end_token() -> None:
    ids = [[5, 6, 2, 2, 2], [5, 6, 7, 8, 9], [2, 2, 2, 2, 2], [5, 3, 7]]
    made = Rollouts.of([[5]] * 4, ids, torch.rand(4, 5), [2, 3], tokenizer())
    assert made.ids() == [[5, 6, 2], [5, 6, 7, 8, 9], [2], [5, 3]]
    assert [len(row) for row in made.logprobs] == made.rows.lengths
    assert made.truncated.tolist() == [False, True, False, False]


@pytest.fixture
def poison(trainer):
    """Makes the logits of one row of a batch, from some token on, what a broken model's are."""
    hooks = []

    def put(row: int, value: float, start: int = 0) -> None:
        seen = []

        def spoil(_module, _inputs, logits):
            seen.append(len(logits))
            rows = torch.arange(len(logits))[:, None, None]  # until rows that have ended leave
            return logits.masked_fill((rows == row) & (len(seen) > start) & (seen[-1] == seen[0]), value)

        hooks.append(trainer.policy.lm_head.register_forward_hook(spoil))

    yield put
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("value", "how"), [(torch.nan, {}), (-torch.inf, {}), (torch.inf, {"keys": None}), (torch.nan, {"keys": None})]
)
def test_logits_that_are_not_finite_name_the_sample_and_the_token(trainer, poison, value, how) -> None:
    poison(3, value, start=2)
    with pytest.raises(FloatingPointError, match=r"^sample 3: .* from token 2 on \(1 of 8 samples\)"):
        sample(trainer, [0], max_completion_length=4, **how)


def test_what_the_model_gives_after_a_completion_has_ended_is_nobodys_matter(trainer, rollouts, poison) -> None:
    lengths = rollouts.rows.lengths
    assert min(lengths) < max(lengths)
    poison(lengths.index(min(lengths)), torch.nan, start=min(lengths))
    assert sample(trainer, [0, 1, 2, 3]).texts == rollouts.texts
