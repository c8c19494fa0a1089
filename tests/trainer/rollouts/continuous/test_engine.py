"""Continuous batching as an engine: the draws of `generate`, whatever is decoded together."""

import pytest
import torch

from tests.support.adapted import PROMPTS, adapted, tiny, tokenizer
from trainer.rollouts import RolloutSettings, TransformersEngine
from trainer.rollouts.engine import end_ids

continuous = pytest.importorskip("trainer.rollouts.continuous.engine", reason="not in this transformers")

MANY = {"max_completion_length": 12, "keys": [(5, i) for i in range(12)], "temperature": 0.8, "top_p": 0.9}
KINDS = {
    "plain": lambda: tiny(),
    "with adapters": lambda: adapted(tiny()),
    "a window": lambda: tiny(
        layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=6
    ),
}


@pytest.fixture(autouse=True)
def without_a_collection_at_each_end(monkeypatch):
    """The manager collects garbage whenever it stops, which here only takes time."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [MANY, {"max_completion_length": 9}], ids=["keyed", "greedy"])
def test_the_same_draws_give_the_completions_of_generate(kind, options) -> None:
    model = KINDS[kind]()
    settings = RolloutSettings(rollout_engine="continuous")
    expected = TransformersEngine(model, tokenizer(), RolloutSettings())(PROMPTS * 3, **options)
    found = continuous.ContinuousEngine(model, tokenizer(), settings, 1e-4)(PROMPTS * 3, **options)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "truncated"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.texts == expected.texts
    if found.logprobs is not None:
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-6, atol=1e-6)
    assert model.config._attn_implementation == "sdpa"


def test_a_completion_ends_at_its_first_end_and_makes_way_for_the_next(monkeypatch) -> None:
    model = tiny()
    free = TransformersEngine(model, tokenizer(), RolloutSettings())(PROMPTS * 3, **MANY)
    model.generation_config.eos_token_id = free.completion_ids[:, 2].unique().tolist()  # most end after three tokens
    expected = TransformersEngine(model, tokenizer(), RolloutSettings())(PROMPTS * 3, **MANY)
    config = continuous.ContinuousBatchingConfig
    monkeypatch.setattr(continuous, "ContinuousBatchingConfig", lambda **given: config(**given | {"num_blocks": 3}))
    found = continuous.ContinuousEngine(model, tokenizer(), RolloutSettings())(PROMPTS * 3, **MANY)
    assert len(end_ids(model, tokenizer())) > 3
    assert len(set(expected.completion_mask.sum(1).tolist())) > 1
    assert found.ids() == expected.ids()
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.truncated, expected.truncated)


def test_a_prompt_that_is_fed_in_parts_writes_over_no_others_log_probs(monkeypatch) -> None:
    model = tiny()
    expected = TransformersEngine(model, tokenizer(), RolloutSettings())(PROMPTS * 3, **MANY)
    engine = continuous.ContinuousEngine(model, tokenizer(), RolloutSettings())
    monkeypatch.setattr(continuous, "_FORWARD", 1)  # 12 tokens at once, of prompts of 33
    torch.testing.assert_close(engine(PROMPTS * 3, **MANY).logprobs, expected.logprobs, rtol=1e-6, atol=1e-6)


def test_log_probs_that_are_not_the_policys_are_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(continuous, "picked", lambda scores, *rest: picked(scores * 0.5, *rest))
    from trainer.rollouts.sampling import picked

    with pytest.raises(ValueError, match=r"log-probs of Qwen3ForCausalLM by continuous batching are not the policy's"):
        continuous.ContinuousEngine(tiny(), tokenizer(), RolloutSettings(), 1e-4)


def test_a_model_that_cannot_run_over_pages_is_refused_by_name() -> None:
    model = tiny()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"continuous batching does not run Qwen3ForCausalLM: .*flex_attention"):
        continuous.ContinuousEngine(model, tokenizer(), RolloutSettings())


def test_logits_that_are_not_finite_are_named() -> None:
    model = tiny()
    engine = continuous.ContinuousEngine(model, tokenizer(), RolloutSettings())
    with torch.no_grad():
        model.model.embed_tokens.weight[PROMPTS[2]] = torch.nan
    with pytest.raises(FloatingPointError, match=r"^p.*p2.* of 4\): the model's logits are not finite \(in p"):
        engine(PROMPTS, **MANY | {"keys": MANY["keys"][:4]}, names=["p0", "p1", "p2", "p3"])
