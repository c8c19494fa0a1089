"""Operators keep their schemas, and every function of theirs reads its arguments by name."""

import pytest
import torch

from cfa_kernels.ops import linear_logprob, linear_logprob_backward, linear_policy_loss, logits_policy_loss
from cfa_kernels.ops import tree_attention as attention
from cfa_kernels.ops.operator_arguments import arguments_of
from cfa_kernels.ops.token_loss import NUMBERS, PolicyOptions

TOKENS = "Tensor? old_logprobs, Tensor advantages, Tensor? weights, Tensor? ref_logprobs, Tensor scale"
FORMULA = "str surrogate, str level, float[] numbers, float[] softmax, bool with_entropy"
TABLE = "Tensor handle, Tensor segments, Tensor contexts"
RULE = "float scale, float? softcap, SymInt? sliding_window, SymInt? attention_chunk_size"
ROWS = "Tensor hidden, Tensor lm_head, Tensor targets, Tensor? bias"
ROWS += ", float temperature, float softcap, bool with_entropy"
SCHEMAS = {
    "linear_logprob": f"({ROWS}, str backend) -> Tensor",
    "linear_logprob_backward": f"(Tensor by_rows, {ROWS}, bool[] wanted, str backend) -> (Tensor, Tensor, Tensor)",
    "linear_policy_loss": (
        f"(Tensor hidden, Tensor head, Tensor? bias, Tensor targets, {TOKENS}, Tensor? entropy_scale, Tensor? rows, "
        f"bool rows_alone, {FORMULA}, bool[] wanted, bool drop_rows, SymInt chunk_size, bool fp32_logits, "
        "str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "logits_policy_loss": (
        f"(Tensor logits, Tensor targets, {TOKENS}, Tensor? entropy_scale, {FORMULA}, bool with_gradient, "
        "str backend) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "logits_policy_loss_": (
        f"(Tensor(a0!) logits, Tensor targets, {TOKENS}, Tensor? entropy_scale, {FORMULA}, "
        "str backend) -> (Tensor, Tensor, Tensor)"
    ),
    "scale_rows": "(Tensor rows, Tensor factor, ScalarType dtype, str backend) -> Tensor",
    "scale_rows_": "(Tensor(a0!) rows, Tensor factor, str backend) -> ()",
    "tree_attention": (
        f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {TABLE}, {RULE}, SymInt first_query_row, "
        "bool with_lse) -> (Tensor, Tensor)"
    ),
    "tree_attention_backward": (
        f"(Tensor by_out, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, {TABLE}, "
        f"{RULE}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
}
OPERATORS = (
    linear_logprob.linear_logprob_op,
    linear_logprob_backward.linear_logprob_backward_op,
    linear_policy_loss.linear_policy_loss_op,
    logits_policy_loss.logits_policy_loss_op,
    logits_policy_loss.logits_policy_loss_inplace_op,
    attention.tree_attention_op,
    attention.tree_attention_backward_op,
)


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_operator_keeps_its_schema(name):
    """A graph that was exported with it calls it by this."""
    assert str(getattr(torch.ops.cfa_kernels, name).default._schema) == f"cfa_kernels::{name}{SCHEMAS[name]}"


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator._name)
def test_arguments_have_the_names_and_the_order_of_the_schema(operator):
    schema = getattr(torch.ops.cfa_kernels, operator._name).default._schema
    names = tuple(argument.name for argument in schema.arguments)
    assert arguments_of(operator)._fields == names
    assert tuple(arguments_of(operator)()) == (None,) * len(names)


def test_options_of_the_loss_survive_the_way_through_an_operator():
    options = PolicyOptions("sapo", "sequence", *range(1, 8))
    assert PolicyOptions.of("sapo", "sequence", options.numbers()) == options
    assert {"surrogate", "level", *NUMBERS} == set(PolicyOptions._fields)
    with pytest.raises(ValueError, match="zip"):
        PolicyOptions.of("sapo", "sequence", options.numbers()[1:])
