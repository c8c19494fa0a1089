"""A forward whose model has changed since is not continued: its rows and later ones would come from two models."""

from functools import partial

import pytest
import torch
from peft import LoraConfig

from cfa_kernels import Batch
from cfa_kernels.loss.ragged import LossBatch
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.packed import packed_forward
from cfa_kernels.tree.prefix_tree import Query
from tests.support.models import PLACEHOLDER, SMALL_ROWS, SMALL_SPANS, score_forward, small_adapted, small_model

ROWS = Rows(*SMALL_ROWS)
QUERY = Query(torch.cat([SMALL_ROWS[0][0], SMALL_ROWS[1][0]]).numpy(), 8, SMALL_ROWS[1][0][:2].numpy())
pytestmark = pytest.mark.usefixtures("unchecked")


def forward_of(model):
    return packed_forward(causal_lm(model), ROWS, keep_states=True)


def drops(forward):
    return torch.cat(score_forward(forward, *SMALL_SPANS, mask=PLACEHOLDER).drop)


def optimizer_step(model, forward, **options):
    sum(row.sum() for row in forward.logprobs()).backward()
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1, **options).step()


def first_layer(model):
    return causal_lm(model).model.layers[0]


def moved(model, _):
    weight = first_layer(model).mlp.up_proj.weight
    weight.data = weight.data.clone()


def other_adapter(model, _):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("other")


CHANGES = {
    "an optimizer step": (small_model, optimizer_step),
    "a fused optimizer step": (small_model, partial(optimizer_step, fused=True)),
    "an adapter's step": (small_adapted, optimizer_step),
    "a checkpoint": (small_model, lambda model, _: model.load_state_dict(small_model().state_dict())),
    "a weight moved": (small_model, moved),
    "an adapter off": (small_adapted, lambda model, _: model.base_model.disable_adapter_layers()),
    "an adapter's factor": (small_adapted, lambda m, _: first_layer(m).mlp.down_proj.set_scale("default", 3.0)),
    "another adapter": (small_adapted, other_adapter),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_forward_whose_model_has_changed_since_is_not_continued(change):
    make, do = CHANGES[change]
    model = make()
    forward = forward_of(model)
    before = drops(forward)
    do(model, forward)
    batch = Batch(ROWS, units=SMALL_SPANS[0], answers=SMALL_SPANS[1])
    for ask in (lambda: forward.query([[QUERY]]), lambda: forward.score(batch, mask=PLACEHOLDER)):
        with pytest.raises(RuntimeError, match="cannot be continued: a weight or an adapter has changed since it ran"):
            ask()
    if change == "an optimizer step":  # so that before and now are not the same model
        assert (drops(forward_of(model)) - before).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("make", "checkpointing"),
    [
        (small_model, None), (small_model, {"use_reentrant": False}), (small_adapted, None),
        (small_adapted, {"use_reentrant": True}),
    ],
)  # fmt: skip
@pytest.mark.traced  # checkpoints compare devices, which the stand-in names otherwise
def test_what_leaves_the_weights_alone_leaves_a_forward_valid(make, checkpointing):
    model = make().train()
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    first, forward = forward_of(model), forward_of(model)
    before = drops(forward)
    sum(row.sum() for row in first.logprobs()).backward()  # gradients of micro-batches add up
    batch = LossBatch.of(ROWS, advantages=torch.tensor([1.0, -1.0]))
    forward.policy_loss(batch).loss.backward()
    model.zero_grad()
    model.eval()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for flag in (False, True):
        for parameter in trainable:
            parameter.requires_grad_(flag)
    if make is small_adapted:
        with model.disable_adapter():
            forward_of(model)
    with torch.autocast(model.device.type, torch.bfloat16):
        forward_of(model)
    torch.testing.assert_close(drops(forward), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", ["an optimizer step", "a checkpoint"])
def test_log_probs_and_loss_are_not_read_by_a_head_that_has_changed_since(change):
    model = small_model()
    forward = packed_forward(model, ROWS)
    CHANGES[change][1](model, forward)
    for read in (forward.logprobs, lambda: forward.policy_loss(LossBatch.of(ROWS, advantages=torch.ones(2)))):
        with pytest.raises(RuntimeError, match="the head has changed since it ran"):
            read()
