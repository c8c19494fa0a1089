"""Liger's modules go into a model while it is scored and trained on a GPU, compute the same, and leave no trace.

Without a GPU its kernels run in Triton's interpreter.
"""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.qwen3 import modeling_qwen3

from cfa_kernels import packed_logprobs
from cfa_kernels.hf.liger import fused_modules, keep_own_modules, keeps_own_modules
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.hf.verify import check_head
from cfa_kernels.rows import Rows
from cfa_kernels.scoring import training_forward
from cfa_kernels.span import Span
from tests.support.liger import liger_runs
from tests.support.models import PLACEHOLDER, assert_equals_naive, make_model, score_columns, tokens

# Checkpoints compare devices, which the stand-in for a GPU gives another name.
pytestmark = [pytest.mark.slow, pytest.mark.traced]

SMALL = ([tokens(4)[0]] * 2, tokens(7, 6, seed=1), [[Span(1, 3)], [Span(0, 2)]], [Span(5, 7), Span(4, 6)])
FORWARD = {"_rms_norm_forward_kernel", "_triton_rope"}


def small_model(name="Qwen3", **changes):
    return make_model(name, num_hidden_layers=1, hidden_size=32, intermediate_size=48, head_dim=8, **changes)


def traces(model):
    """What could be left behind: every module's attributes, and the functions of the model's file."""
    modules = {name: dict(module.__dict__) for name, module in model.named_modules()}
    return modules, dict(vars(modeling_qwen3))


def assert_no_trace(model, before):
    for old, new in zip((*before[0].values(), before[1]), (*traces(model)[0].values(), traces(model)[1]), strict=True):
        assert old.keys() == new.keys()
        assert all(old[name] is new[name] for name in old if name != "training")


@pytest.mark.parametrize(
    ("name", "gate"), [("Qwen3", "_swiglu_forward_kernel"), ("Gemma2", "_geglu_tanh_forward_kernel"), ("Cohere", None)]
)
def test_scores_by_fused_modules_are_those_of_the_models_own(name, gate):
    model = small_model(name)
    with liger_runs() as ran:
        scores = score_columns(model, *SMALL, mask=PLACEHOLDER)
    assert {kernel for kernel in ran if kernel.startswith(("_rms", "_triton", "_swi", "_geg"))} == (
        {*FORWARD, gate} if gate else set()
    )
    assert_equals_naive(scores, model, *SMALL)


def adapted(**checkpointing):
    """Adapters inside the attention and the gated MLP, off the identity they start as."""
    torch.manual_seed(3)
    model = get_peft_model(small_model(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return model.train()


def gradients(model):
    sum(row.square().sum() for row in packed_logprobs(model, Rows(*SMALL[:2]))).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("checkpointing", [{}, {"use_reentrant": False}, {"use_reentrant": True}])
def test_adapters_train_through_fused_modules_also_where_layers_run_again_in_the_backward(checkpointing, monkeypatch):
    monkeypatch.setattr(training_forward, "check_trainable", check_head)
    own, model = adapted(), adapted(**checkpointing)
    keep_own_modules(causal_lm(own))
    expected = gradients(own)
    before, state = traces(model), list(model.state_dict())
    with liger_runs() as ran:
        found = gradients(model)
    assert {*FORWARD, "_rms_norm_backward_kernel", "_swiglu_forward_kernel", "_swiglu_backward_kernel"} <= set(ran)
    assert ran.count("_swiglu_forward_kernel") == (2 if checkpointing else 1)
    assert list(model.state_dict()) == state
    assert_no_trace(model, before)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


def two_backwards(model):
    """Of one packed forward; and what one of them should give."""
    weight = causal_lm(model).model.layers[0].self_attn.q_proj.weight
    loss = sum(row.square().sum() for row in packed_logprobs(model, Rows(*SMALL[:2])))
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    return torch.autograd.grad(loss, weight)[0], first


def test_a_second_backward_over_activations_that_the_first_has_overwritten_is_refused(monkeypatch):
    monkeypatch.setattr(training_forward, "check_trainable", check_head)
    model = small_model().train()
    with (
        liger_runs(),
        pytest.raises(RuntimeError, match=r"a second backward through one packed forward.*call backward"),
    ):
        two_backwards(model)
    keep_own_modules(model)
    second, first = two_backwards(model)
    torch.testing.assert_close(second, first)


@pytest.mark.parametrize("case", ["no gate is exchanged", "layers run again"])
def test_a_second_backward_is_taken_where_nothing_is_overwritten(case, monkeypatch):
    monkeypatch.setattr(training_forward, "check_trainable", check_head)
    model = small_model().train()
    if case == "no gate is exchanged":
        monkeypatch.setattr("cfa_kernels.hf.liger._FILES", ("liger_kernel.transformers.rms_norm",))
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with liger_runs() as ran:
        second, first = two_backwards(model)
    assert ("_swiglu_forward_kernel" in ran) == (case == "layers run again")
    assert "_triton_rope" in ran
    torch.testing.assert_close(second, first)


def test_gradients_at_the_hidden_states_are_no_backward_through_the_modules(monkeypatch):
    monkeypatch.setattr(training_forward, "check_trainable", check_head)
    model = small_model().train()
    with liger_runs():
        forward = training_forward.packed_forward(model, Rows(*SMALL[:2]))
        loss = sum(row.sum() for row in forward.logprobs())
        for _ in range(2):
            torch.autograd.grad(loss, forward.fed[0].hidden, retain_graph=True)
        loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_hooks_still_act_and_an_error_leaves_no_trace():
    model = small_model()
    before = traces(model)

    def fail(*_):
        assert modeling_qwen3.apply_rotary_pos_emb is not before[1]["apply_rotary_pos_emb"]
        raise OSError("stop")

    hook = model.model.layers[0].mlp.register_forward_hook(fail)
    with liger_runs(), pytest.raises(OSError, match="stop"), fused_modules(model):
        model(input_ids=torch.ones(1, 2, dtype=torch.int64, device=model.device))
    hook.remove()
    assert_no_trace(model, before)


def test_models_on_a_cpu_and_those_that_are_to_keep_their_modules_do():
    model = small_model().cpu()
    before = traces(model)
    with fused_modules(model) as fused:
        assert not fused
        assert_no_trace(model, before)
    keep_own_modules(model)
    with liger_runs(), fused_modules(model) as fused:
        assert keeps_own_modules(model)
        assert not fused
        assert_no_trace(model, before)


def test_a_forward_that_somebody_else_put_in_stays():
    model = small_model()
    norm = model.model.norm
    own = norm.forward = lambda x: x
    with liger_runs(), fused_modules(model):
        assert norm.forward is own
        assert "liger" in model.model.layers[0].mlp.forward.__func__.__module__
    assert norm.forward is own


def test_modules_that_compute_something_else_are_found_out_and_not_used():
    model = small_model(hidden_act="gelu")  # whose gate Liger takes for SwiGLU's
    device = model.device
    score_columns(model.cpu(), *SMALL, mask=PLACEHOLDER)  # what a CPU shows tells nothing of them
    model.to(device)
    with liger_runs(), pytest.warns(UserWarning, match="keeps its own norms.*does not compute the same"):
        scores = score_columns(model, *SMALL, mask=PLACEHOLDER)
    assert_equals_naive(scores, model, *SMALL)
    with liger_runs() as ran, warnings.catch_warnings():
        warnings.simplefilter("error")
        score_columns(model, *SMALL, mask=PLACEHOLDER)
    assert not FORWARD & set(ran)
    assert keeps_own_modules(causal_lm(model))
