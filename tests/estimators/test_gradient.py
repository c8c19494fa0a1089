"""Gradients equal plain forwards and autograd, row by row, and leave the model and its own gradients alone."""

import contextlib
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from cfa_kernels.estimators import gradient
from cfa_kernels.estimators.gradient import Gradient
from cfa_kernels.model.check.verify import check_supported
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.span import Span
from tests.support.models import (
    ARCHITECTURES,
    HYBRIDS,
    LONGROPE,
    MASKED,
    OTHERS,
    batch,
    batch_of,
    make_model,
    snapshot,
    tokens,
)

pytestmark = pytest.mark.slow

OUTCOMES = ["last", "mean", "mean_logprob", "logprob"]
PROMPTS, COMPLETIONS, UNITS, ANSWERS = batch()
ON_THE_HOST = pytest.mark.traced  # nothing to tell apart


@functools.cache
def double_model(name):
    """In float64, but for what the model itself computes in float32."""
    return make_model(name, final_logit_softcapping=2.0 if name == "Gemma2" else None).cpu().double()


def saliency(model, rows=None, **options):
    rows = range(len(PROMPTS)) if rows is None else rows
    columns = ([column[b] for b in rows] for column in (PROMPTS, COMPLETIONS, UNITS, ANSWERS))
    return saliency_and_work(model, *columns, index=list(rows), **options)[0]


def saliency_and_work(model, *columns, seed=(), index=None, token_budget=None, **options):
    given = batch_of(model, *columns, seed=seed, index=index, token_budget=token_budget)
    found = Gradient(**options)(InProcess(model), given)
    return found.values, found.work


@contextlib.contextmanager
def first_layer_inputs(model):
    """What the first layer is given in each forward: (rows, H)."""
    seen = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()[0]))
    check_supported(model)  # again, as it has a hook
    seen.clear()
    try:
        yield seen
    finally:
        hook.remove()


def noise_of_row(model, b, **options):
    """(tokens fed, H) of each draw, and the noise's tokens, by watching the model run on one row alone."""
    check_supported(model)  # by forwards of its own
    ids = torch.cat([PROMPTS[b], COMPLETIONS[b]])
    clean = model.get_input_embeddings()(ids).detach()
    with first_layer_inputs(model) as plain, torch.no_grad():
        model(input_ids=ids[None])
    scale = plain[0].norm() / clean.norm()
    with first_layer_inputs(model) as fed:
        saliency(model, [b], **options)
    noises = [(one - plain[0][: len(one)]) / scale for one in fed]
    return [noise for noise in noises if noise.abs().max() > 1e-9]


def reference(model, b, outcome, noises):
    """(K,) importances in float64 by plain forwards of one whole row: the definition."""
    prompt, completion, answer = PROMPTS[b], COMPLETIONS[b], ANSWERS[b]
    first = len(prompt) + answer.start - 1
    rows = slice(first, first + 1) if outcome == "last" else slice(first, first + answer.end - answer.start)
    targets = completion[answer.start : answer.end]
    clean = model.get_input_embeddings()(torch.cat([prompt, completion])[None]).detach()

    def logits(embeds):
        return model(inputs_embeds=embeds).logits[0, rows].double()

    with torch.no_grad():
        base = logits(clean)
    total = torch.zeros(len(completion), dtype=torch.float64)
    for noise in noises:
        fed = clean.clone()
        fed[0, : len(noise)] += noise
        fed.requires_grad_()
        found = logits(fed)
        if outcome in ("last", "mean"):
            p, q = base.mean(0).log_softmax(-1), found.mean(0).log_softmax(-1)
            change = (p.exp() * (p - q)).sum()
        else:
            change = sum(
                base[i].log_softmax(-1)[target] - found[i].log_softmax(-1)[target] for i, target in enumerate(targets)
            )
            change = change / len(targets) if outcome == "mean_logprob" else change
        (gradient,) = torch.autograd.grad(change, fed)
        total += (gradient * clean).sum(-1).abs()[0, len(prompt) :] / len(noises)
    return torch.stack([total[start:end].sum() for start, end in UNITS[b]]) if UNITS[b] else torch.zeros(0)


def assert_close(ours, theirs, tolerance=1e-4):
    """Beside what models compute in float32 whatever their dtype, which shows where hardly anything moves."""
    assert ours.dtype == torch.float32
    assert ours.device.type == "cpu"
    torch.testing.assert_close(
        ours, theirs.float(), rtol=tolerance, atol=1e-8 + tolerance * float(max(theirs, default=0))
    )


@pytest.mark.parametrize(
    ("name", "outcome"), [*(("Qwen3", outcome) for outcome in OUTCOMES), ("Llama", "last"), ("Gemma2", "mean")]
)
@ON_THE_HOST
def test_importances_are_those_of_plain_forwards_under_the_same_noise(name, outcome):
    model, options = double_model(name), {"outcome": outcome, "sigma": 0.03, "samples": 3}
    found = saliency(model, seed=(7,), **options)
    for b, ours in enumerate(found):
        if ANSWERS[b] is None:
            assert ours.isnan().tolist() == [True] * len(UNITS[b])
        elif UNITS[b] and b not in (2, 4):  # shorter ones of the same prompts
            noises = noise_of_row(model, b, seed=(7,), **options)
            assert len(noises) == 3
            assert_close(ours, reference(model, b, outcome, noises))


MORE = {
    "Gemma3Text": {}, "Cohere": {}, "Granite": {}, "Qwen3Moe": {}, "Qwen2": {"tie_word_embeddings": True},
    "Phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    **{name: (OTHERS | MASKED | HYBRIDS)[name] for name in ("DeepseekV3", "GptOss", "Llama4Text", "Bamba", "Lfm2")},
}  # fmt: skip


@ON_THE_HOST
@pytest.mark.parametrize("name", MORE)
def test_without_noise_they_are_gradient_times_input_on_every_kind_of_model(name):
    model = make_model(name, **ARCHITECTURES.get(name, {}) | MORE[name]).cpu().eval()
    model.set_attn_implementation("eager")
    found = saliency(model, outcome="mean_logprob", sigma=0)
    for b, ours in enumerate(found):
        if ANSWERS[b] is not None and UNITS[b]:
            assert_close(ours, reference(model, b, "mean_logprob", [torch.zeros(1, 1)]), 1e-3)


@ON_THE_HOST
@pytest.mark.parametrize(("outcome", "budget"), [("last", None), ("mean", 1), ("last", 60)])
def test_a_row_depends_neither_on_its_neighbours_and_their_order_nor_on_the_budget(outcome, budget):
    model, options = (
        double_model("Qwen3"),
        {"outcome": outcome, "samples": 2, "sigma": 0.01},
    )
    apart = [saliency(model, [b], seed=(7,), **options)[0] for b in range(len(PROMPTS))]
    order = [4, 6, 2, 0, 3, 1, 5]
    together = saliency(model, order, seed=(7,), token_budget=budget, **options)
    for b, ours in zip(order, together, strict=True):
        if ANSWERS[b] is not None:
            assert_close(ours, apart[b])


def test_noise_is_normal_on_the_units_tokens_alone_anew_in_every_draw_and_the_same_for_every_number_of_draws():
    model = double_model("Llama")
    three = noise_of_row(model, 1, sigma=0.5, samples=3, seed=(7,))
    inside = torch.zeros(len(PROMPTS[1]) + len(COMPLETIONS[1]), dtype=torch.bool)
    for start, end in UNITS[1]:
        inside[len(PROMPTS[1]) + start : len(PROMPTS[1]) + end] = True
    for noise in three:
        assert noise[~inside[: len(noise)]].abs().max() < 1e-9
    drawn = torch.stack([noise[inside[: len(noise)]] for noise in three])
    assert abs(drawn.std() - 0.5) < 0.05
    assert abs(drawn.mean()) < 0.05
    assert (drawn[0] - drawn[1]).abs().mean() > 0.3
    (one,) = noise_of_row(model, 1, sigma=0.5, samples=1, seed=(7,))
    torch.testing.assert_close(one, three[0])
    (other,) = noise_of_row(model, 1, sigma=0.5, samples=1, seed=(8,))
    assert (other - one).abs().max() > 0.3


@pytest.mark.parametrize(("outcome", "end", "forwards"), [("last", 16, 4), ("mean", 18, 4), ("logprob", 18, 3)])
def test_prompts_are_fed_once_and_each_completion_by_itself_up_to_the_rows_that_decide_its_outcome(
    outcome, end, forwards
):
    model = double_model("Qwen3")
    (prompt,), (completion,) = tokens(9), tokens(20, seed=5)
    values, work = saliency_and_work(
        model, [prompt] * 2, [completion] * 2, [[Span(2, 5)]] * 2, [Span(16, 19)] * 2, outcome=outcome, samples=3,
        index=[0, 0],
    )  # fmt: skip
    assert torch.equal(values[0], values[1])
    assert (work.forwards, work.tokens_fed) == (forwards, forwards * (9 + 2 * end))
    assert work.tokens_unshared == forwards * 2 * (9 + end)


@pytest.mark.parametrize(
    ("grad", "fails"), [("enabled", False), ("no_grad", True), ("inference_mode", False), ("inference_mode", True)]
)
def test_the_model_is_left_as_it_was_also_when_it_fails(grad, fails, monkeypatch):
    model = make_model("Qwen3").train()
    model.model.layers[1].eval()
    model.model.norm.weight.requires_grad_(False)
    check_supported(model)
    for i, parameter in enumerate(model.parameters()):
        if i % 2 and parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    before, versions = snapshot(model), [parameter._version for parameter in model.parameters()]
    if fails:
        monkeypatch.setattr(gradient, "_divergence_by_rows", lambda *_: 1 / 0)
    context = {"enabled": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[grad]
    with context(), pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        assert saliency(model)[0].max() > 0
    assert snapshot(model) == before
    assert [parameter._version for parameter in model.parameters()] == versions


def test_an_adapter_and_wrappers_are_seen_through_and_checkpointing_is_not_in_the_way():
    model = get_peft_model(
        make_model("Qwen3").cpu(),
        LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    base = model.get_base_model().eval()
    found = saliency(model, outcome="mean_logprob", sigma=0)
    assert_close(found[1], reference(base, 1, "mean_logprob", [torch.zeros(1, 1)]), 1e-3)
    with model.disable_adapter():
        assert (saliency(model, outcome="mean_logprob", sigma=0)[1] - found[1]).abs().max() > 1e-3
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train().enable_input_require_grads()
    for wrapped in (model, torch.compile(model), torch.nn.DataParallel(model)):
        again = saliency(wrapped, outcome="mean_logprob", sigma=0)
        torch.testing.assert_close(again[1], found[1])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_below_what_float16_resolves_are_not_lost():
    model = make_model("Qwen3", initializer_range=0.05)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-6)
    exact = saliency(model, outcome="mean_logprob", sigma=0)[1]
    model.half()
    with torch.no_grad():  # what float16 holds of so small a head is another one
        model.lm_head.float()
    halves = saliency(model, outcome="mean_logprob", sigma=0)[1]
    assert 0 < exact.max() < 1e-6
    torch.testing.assert_close(halves, exact, rtol=0.1, atol=0.05 * exact.max().item())


def test_a_model_that_passes_no_gradient_to_its_embeddings_is_refused_by_name(monkeypatch):
    model = make_model("Qwen3")
    check_supported(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[0], "forward", torch.no_grad()(model.model.layers[0].forward))
        with pytest.raises(NotImplementedError, match="Qwen3ForCausalLM passes no gradient to its embeddings"):
            saliency(model)
    own = model.model.forward

    def looks_up_by_itself(input_ids, inputs_embeds=None, **options):
        return own(inputs_embeds=functional.embedding(input_ids, model.model.embed_tokens.weight), **options)

    monkeypatch.setattr(model.model, "forward", looks_up_by_itself)
    with pytest.raises(NotImplementedError, match="looks tokens up 0 times in its input embedding, not once"):
        saliency(model)
