"""Every function of an operator reads its arguments by name."""

import pytest
import torch

from cfa_kernels.loss import linear as linear_policy_loss
from cfa_kernels.loss import logits as logits_policy_loss
from cfa_kernels.ops import linear_logprob
from cfa_kernels.ops.operator_arguments import arguments_of
from cfa_kernels.tree import attention

OPERATORS = (
    linear_logprob.linear_logprob_op, linear_logprob.linear_logprob_backward_op,
    linear_policy_loss.linear_policy_loss_op, logits_policy_loss.logits_policy_loss_op, attention.tree_attention_op,
    attention.tree_attention_backward_op,
)  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator._name)
def test_arguments_have_the_names_and_the_order_of_the_schema(operator):
    schema = getattr(torch.ops.cfa_kernels, operator._name).default._schema
    names = tuple(argument.name for argument in schema.arguments)
    assert arguments_of(operator)._fields == names
    assert tuple(arguments_of(operator)()) == (None,) * len(names)
