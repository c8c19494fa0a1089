"""One packed forward with gradients equals padded forwards with autograd: log-probs, losses, scores, gradients."""

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cfa_kernels import Batch, CounterfactualConfig, Credit, Probe, Span, counterfactual_credit, policy_loss
from cfa_kernels.loss.ragged import LossBatch
from cfa_kernels.rows import Rows
from cfa_kernels.scoring import packed
from cfa_kernels.scoring.packed import packed_forward, packed_logprobs, packed_policy_loss
from tests.support.models import (
    ARCHITECTURES,
    HYBRIDS,
    LONGROPE,
    MASKED,
    OTHERS,
    PLACEHOLDER,
    assert_equals_naive,
    assert_same_gradients,
    batch,
    float64_throughout,
    gradients,
    make_model,
    plain_logprobs,
    score_columns,
    score_forward,
    tokens,
)
from tests.support.policy_problem import KINDS, drawn_features
from tests.support.tiny import PHRASES, WORDS, tiny_model, tiny_tokenizer

PROMPTS, COMPLETIONS, SPANS, ANSWERS = batch()
ROWS = Rows(PROMPTS, COMPLETIONS)
CREDIT = Credit.joined(ROWS.lengths, [])


def drawn(seed: int, *, low=-1.0, high=1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty(len(row)).uniform_(low, high, generator=generator) for row in COMPLETIONS]


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def weighted(logprobs: list[torch.Tensor]) -> torch.Tensor:
    """A scalar that every log-prob enters with a factor of its own."""
    return sum((row * factor.to(row.device)).sum() for row, factor in zip(logprobs, drawn(0), strict=True))


def assert_packs_like_plain_forwards(model, *, tolerance=1e-5, **options):
    theirs = plain_logprobs(model, PROMPTS, COMPLETIONS, 0.7, with_entropies=True)
    ours = packed_logprobs(model, ROWS, temperature=0.7, return_entropy=True, **options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=max(tolerance, 2e-5))
    assert_same_gradients(gradients(model, weighted(ours[0])), gradients(model, weighted(theirs[0])), tolerance)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_and_gradients_are_those_of_full_forwards(name):
    # Granite's multipliers enlarge the rounding of float32 products twenty times.
    exact = float64_throughout if name == "Granite" else contextlib.nullcontext
    with exact(model := make_model(name)):
        assert_packs_like_plain_forwards(model)


@pytest.mark.parametrize("name", ["GptOss", "DeepseekV3", "Llama4Text", "Bamba", "Lfm2"])
def test_so_they_are_with_sinks_latent_attention_chunks_windows_and_states(name):
    model = make_model(name, **(OTHERS | MASKED | HYBRIDS)[name])
    model.set_attn_implementation("eager")
    assert_packs_like_plain_forwards(model.train())


@pytest.mark.parametrize(("budget", "reentrant"), [(1, None), (60, True), (1, False)])
def test_so_they_are_in_several_packs_and_with_checkpointed_layers(budget, reentrant):
    model = make_model("Qwen3").train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    before = model.config._attn_implementation
    assert_packs_like_plain_forwards(model, token_budget=budget)
    assert model.config._attn_implementation == before


def adapted(dropout: float = 0.0):
    model = get_peft_model(
        make_model("Qwen3"), LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
    )
    return model.train()


@pytest.mark.parametrize(
    ("order", "reentrant", "padding"),
    [
        ("packed plain packed", True, 0), ("packed plain packed", False, 4),
        ("plain packed plain", True, 4), ("plain packed plain", False, 0),
    ],
)  # fmt: skip
def test_one_backward_runs_the_layers_of_plain_and_packed_forwards_again_each_its_own_way(
    order, reentrant, padding, unchecked
):
    """The backward goes through what came last first, so each kind is run again before, between and after the other."""
    ids, mask = torch.stack(tokens(9, 9, seed=3)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :padding] = 0

    def total(model):
        there = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device) if padding else None}

        def plain():
            return model(**there, labels=there["input_ids"]).loss

        def packed():
            return sum(row.square().mean() for row in packed_logprobs(model, Rows(PROMPTS[:3], COMPLETIONS[:3])))

        kinds = {"plain": plain, "packed": packed}
        return sum((i + 1) * kinds[kind]() for i, kind in enumerate(order.split()))

    model = make_model("Qwen3", num_hidden_layers=2).train()
    expected = gradients(model, total(model))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    before = model.config._attn_implementation, [dict(vars(module)) for module in model.modules()]
    loss = total(model)
    for module, old in zip(model.modules(), before[1], strict=True):
        assert vars(module).keys() == old.keys()
        assert all(vars(module)[name] is old[name] for name in old)
    assert_same_gradients(gradients(model, loss), expected)
    assert model.config._attn_implementation == before[0]


@pytest.mark.parametrize(("loss_type", "level"), [*KINDS[::2], ("vespo", "token")])
def test_loss_metrics_and_gradients_are_those_of_the_padded_batch(loss_type, level):
    """With options drawn together, others for each loss type; tests of the loss compare every level."""
    model, features = make_model("Qwen3", num_hidden_layers=1), drawn_features(0, loss_type, level)
    names = ("old", "weights", "token_advantages", "temperature", "correction", "softcap", "logit_scale")
    has_old, has_weights, by_token, temperature, mode, *_ = (features.pop(name) for name in names)
    signs = torch.tensor([1.0, -0.5, 0.0, 0.7, -1.2, 0.3, 0.0])
    advantages = [sign * (row + 0.2) for sign, row in zip(signs, drawn(6), strict=True)] if by_token else signs
    with torch.no_grad():
        current = [row.cpu() for row in plain_logprobs(model, PROMPTS, COMPLETIONS, temperature)]
    near = [[row + 0.3 * noise for row, noise in zip(current, drawn(seed), strict=True)] for seed in (3, 4, 5)]
    weights, old, columns = drawn(1, low=0, high=3), near[0] if has_old else None, {}
    if level == "sequence":
        weights = [row[:1].expand(len(row)) for row in weights]
    if has_weights:
        columns["weights"] = weights
    if features["beta"]:
        columns["ref_logprobs"] = near[1]
    if mode or features["off_policy_mask_threshold"]:
        columns["sampling_logprobs"], features["sampling_mode"] = near[2], mode
    mask, options = [(row > -0.6).long() for row in drawn(2)], features | {"max_completion_length": 50}
    ours = packed_policy_loss(
        model, ROWS, old_logprobs=old, advantages=advantages, mask=mask, temperature=temperature, token_budget=60,
        **columns, **options,
    )  # fmt: skip
    found = gradients(model, ours.loss)
    logprobs, entropies = plain_logprobs(model, PROMPTS, COMPLETIONS, temperature, with_entropies=True)
    theirs, metrics = policy_loss(
        padded(logprobs),
        padded(old).to(model.device) if has_old else None,
        *(x.to(model.device) for x in (padded(advantages) if by_token else signs, padded(mask))),
        entropies=padded(entropies) if options["entropy_coef"] else None,
        **{name: padded(column).to(model.device) for name, column in columns.items()},
        **options,
    )  # fmt: skip
    assert_same_gradients(found, gradients(model, theirs))
    torch.testing.assert_close(ours.loss, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.metrics, metrics, rtol=1e-4, atol=1e-5)
    for b, row in enumerate(ours.logprobs):
        looked = row.isfinite()
        assert not looked.any() or signs[b] != 0 or options["beta"] or options["entropy_coef"]
        torch.testing.assert_close(row[looked].cpu(), current[b][looked.cpu()], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["Qwen3", "Bamba"])
def test_prompts_without_a_trained_row_are_fed_without_gradient(name, monkeypatch):
    model = make_model(name, **HYBRIDS.get(name, {}))
    prompts, rows = [p for p in tokens(9, 9, 7) for _ in range(2)], tokens(*[12] * 6, seed=5)
    advantages = torch.tensor([0.0, 0.0, 1.0, 0.0, -1.0, 1.0])
    options = {"compute_entropy": True, "epsilon": 0.2}
    with_gradient = []
    feed = packed.packed_hidden

    def recorded(*args, **kwargs):
        hidden = feed(*args, **kwargs)
        with_gradient.append((hidden.requires_grad, len(hidden)))
        return hidden

    monkeypatch.setattr(packed, "packed_hidden", recorded)
    ours = packed_policy_loss(model, Rows(prompts, rows), advantages=advantages, **options)
    assert with_gradient == [(True, 9 + 2 * 11 + 7 + 2 * 11), (False, 9 + 2 * 11)]
    plan = packed.plan_training
    monkeypatch.setattr(packed, "plan_training", lambda *arguments, **options: plan(*arguments[:-1], **options))
    whole = packed_policy_loss(model, Rows(prompts, rows), advantages=advantages, **options)
    assert with_gradient[2:] == [(True, 9 + 9 + 7 + 6 * 11)]
    torch.testing.assert_close(ours.logprobs, whole.logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.metrics["entropy"], whole.metrics["entropy"], rtol=1e-5, atol=0)
    assert_same_gradients(gradients(model, ours.loss), gradients(model, whole.loss))


def test_a_loss_that_trains_nothing_is_zero_and_has_zero_gradients_of_one_token():
    model, rows = make_model("Qwen3", num_hidden_layers=1), tokens(12, 12, seed=5)
    rows = Rows(tokens(9, 7), rows)
    plain = packed_policy_loss(model, rows, advantages=torch.zeros(2))
    assert plain.loss == 0
    assert all(row.isnan().all() for row in plain.logprobs)
    found = packed_policy_loss(model, rows, advantages=torch.zeros(2), compute_entropy=True)
    forward = packed_forward(model, rows, trained=[False, False])
    assert [one.pack.num_tokens for one in forward.packs if one.hidden.requires_grad] == [1]
    found.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert found.metrics["entropy"] > 0
    kl = LossBatch.of(rows, advantages=torch.zeros(2), ref_logprobs=[torch.zeros(12)] * 2, beta=0.1)
    assert kl.trained.tolist() == [True, True]
    assert LossBatch.of(rows, advantages=torch.tensor([0.0, 1.0]), compute_entropy=True).trained.tolist() == [
        False,
        True,
    ]


APART = {"Bamba": HYBRIDS["Bamba"], "Phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("Qwen3", "Gemma2", "Qwen3Moe", *APART)),
        *((name, {"token_budget": 25}) for name in ("Qwen3", "Phi3")),
        *((name, {"needed": [5] * 7}) for name in ("Gemma2", "Bamba")),
    ],
    ids=str,
)
def test_scores_read_off_the_training_forward_are_those_of_separate_scoring(name, options):
    """An answer beyond what was fed is fed with the branches; forwards of some models cannot be continued at all."""
    model = make_model(name, **APART.get(name, {}))
    forward = packed_forward(model.train(), ROWS, keep_states=True, **options)
    scores = score_forward(forward, SPANS, ANSWERS, mask=PLACEHOLDER, token_budget=options.get("token_budget"))
    tolerance = 5e-5 if name in APART else 2e-5
    assert_equals_naive(scores, model.eval(), PROMPTS, COMPLETIONS, SPANS, ANSWERS, tolerance=tolerance)
    if name in APART and not options:
        assert_packs_like_plain_forwards(model)
    elif not options:
        apart = score_columns(model, PROMPTS, COMPLETIONS, SPANS, ANSWERS, mask=PLACEHOLDER)
        assert scores.work.tokens_fed < apart.work.tokens_fed <= scores.work.tokens_fed + forward.tokens_fed
    if "needed" not in options:
        weighted(forward.logprobs()).backward()  # scoring has left the graph whole


LATER = {
    "dropout of attention": ("Qwen3", "model.layers.1.self_attn", "attention_dropout", 0.1),
    "scale of logits": ("Cohere", "", "logit_scale", 0.3),
}


@pytest.mark.parametrize(("name", "module", "attribute", "value"), LATER.values(), ids=LATER)
def test_a_change_that_is_found_while_the_device_runs_gives_no_forward(name, module, attribute, value):
    model = make_model(name).train()
    packed_forward(model, ROWS)
    owner = model.get_submodule(module)
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=name):
            packed_forward(model, ROWS)
    setattr(owner, attribute, before)
    packed_forward(model, ROWS)


def test_a_forward_that_cannot_be_continued_says_why():
    model = make_model("Qwen3")
    with pytest.raises(ValueError, match="keep_states must be True"):
        score_forward(packed_forward(model, ROWS), SPANS, ANSWERS, mask=PLACEHOLDER)
    with pytest.raises(ValueError, match="router_loss must be True"):
        packed_forward(model, ROWS).router_loss()
    forward = packed_forward(model, ROWS, needed=[0, 33, 17, 41, 30, 12, 20], keep_states=True)
    with pytest.raises(ValueError, match=r"answers row 0: its completion was not fed \(needed\[0\] was 0\)"):
        score_forward(forward, SPANS, ANSWERS, mask=PLACEHOLDER)


PROBE = Probe(torch.tensor([PHRASES.index("#### 5") + len(WORDS)]), Span(0, 1))
SAID = ("3 + 4 = 7. ", "7 - 2 = 5. ", "#### 5")


@pytest.mark.parametrize(
    ("probes", "said"), [(None, SAID), (None, SAID[:2]), ([PROBE, None], SAID)], ids=["answered", "no answer", "probe"]
)
@pytest.mark.parametrize("options", [{}, {"estimator.mask": "drop"}, {"estimator": "prefix_gain"}], ids=str)
def test_credit_on_a_training_forward_is_that_of_a_forward_of_its_own(options, probes, said):
    tokenizer, model = tiny_tokenizer(), tiny_model()
    ids = torch.tensor([len(WORDS) + PHRASES.index(phrase) for phrase in said])
    rows, config = Rows([torch.tensor([3, 4, 5]), torch.tensor([3, 4, 6])], [ids] * 2), CounterfactualConfig.of(options)
    apart = counterfactual_credit(model, tokenizer, rows, config=config, probes=probes)
    forward = packed_forward(model, rows, keep_states=True)
    credit = counterfactual_credit(forward, tokenizer, rows, config=config, probes=probes)
    assert credit.spans == apart.spans
    assert any(credit.spans) == (said == SAID or probes is not None)
    torch.testing.assert_close(credit.padded(), apart.padded(), rtol=0, atol=1e-4)
    if any(credit.spans):
        assert credit.work.tokens_fed <= apart.work.tokens_fed - len(rows.prompts[0])
        forgetful = packed_forward(model, rows)
        with pytest.raises(ValueError, match="keep_states must be True"):
            counterfactual_credit(forgetful, tokenizer, rows, config=config, probes=probes)


def test_what_is_asked_of_a_forward_is_refused_by_argument_row_and_value():
    model = make_model("Qwen3", num_hidden_layers=1)
    with pytest.raises(ValueError, match="needed row 1: must be a number of tokens from 0 to 33, got 34"):
        packed_forward(model, ROWS, needed=[5, 34, *[5] * 5])
    with pytest.raises(ValueError, match="rows must be of class Rows, got tuple"):
        packed_logprobs(model, (PROMPTS, COMPLETIONS))
    shorter = Rows(PROMPTS[:2], [row[:-1] for row in COMPLETIONS[:2]])
    with pytest.raises(ValueError, match="rows: must be those of packed_forward, and row 0 of 19 tokens is not"):
        packed_forward(model, ROWS, keep_states=True).score(Batch(shorter), mask=PLACEHOLDER)
    forward = packed_forward(model, ROWS, needed=[12] * 7, keep_states=True)
    with pytest.raises(ValueError, match="token_budget must be at least 1, got 0"):
        score_forward(forward, SPANS, ANSWERS, mask=PLACEHOLDER, token_budget=0)
    whole = LossBatch.of(ROWS, advantages=torch.ones(7))
    with pytest.raises(ValueError, match=r"batch row 0: its loss needs 20 tokens, but 12 were fed \(needed\[0\]\)"):
        forward.policy_loss(whole)
    rows = Rows(tokens(9, 7), tokens(12, 12))
    some = packed_forward(model, rows, trained=[False, True])
    with pytest.raises(ValueError, match=r"batch row 0: its loss has a gradient, but it was fed without \(trained\[0"):
        some.policy_loss(LossBatch.of(rows, advantages=torch.ones(2)))
    with pytest.raises(ValueError, match="batch has 2 rows, this forward has 7; they must agree"):
        forward.policy_loss(LossBatch.of(ROWS.take([0, 1]), advantages=torch.ones(2)))


def test_no_rows_give_no_log_probs_and_no_scores_but_an_error_for_a_loss(unchecked):
    for own_rotary in ({}, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}):
        model = make_model("Phi3", num_hidden_layers=1, **own_rotary)  # whose rows are continued, and whose are not
        forward = packed_forward(model, Rows([], []), keep_states=True)
        assert forward.tokens_fed == 0
        assert forward.logprobs() == []
        assert len(score_forward(forward, [], [], mask=PLACEHOLDER).base) == 0
        assert forward.query([])[0] == []
    assert packed_logprobs(model, Rows([], [])) == []
    assert packed_logprobs(model, Rows([], []), return_entropy=True) == ([], [])
    with pytest.raises(ValueError, match="completions: a loss needs at least one row, got none"):
        packed_policy_loss(model, Rows([], []), advantages=torch.zeros(0))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_gradient_of_a_shared_row_is_the_same_bits_every_time(threads):
    """However many completions add to it, they do so in a fixed order, whatever the threads."""
    forward = packed_forward(make_model("Llama"), Rows(PROMPTS[:1], COMPLETIONS[:1]))
    (hidden,) = (one.hidden for one in forward.packs)
    factors = torch.randn(4000, hidden.shape[1], generator=torch.Generator().manual_seed(0)).to(hidden.device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        loss = (forward._hidden(torch.full((4000,), 3)) * factors).sum()
        first, *others = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(20))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first, again) for again in others)
