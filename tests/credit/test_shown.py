"""Credit as a person sees it: a short table, and completions shaded by the weights of their tokens."""

import pickle
import re
from dataclasses import replace

import torch

from cfa_kernels import Credit, Span

CREDIT = Credit(
    weights=[torch.tensor([0.5, 1.0, 4.0]), torch.ones(2)], answers=[Span(2, 3), None],
    spans=[[Span(0, 1), Span(2, 3)], []], drop=[torch.tensor([-0.0001, 13.9]), torch.zeros(0)],
    base=torch.tensor([-0.1, torch.nan]), work=None, texts=lambda b: [["<b>", " and ", "2\n"], ["x", "y"]][b],
)  # fmt: skip


def test_a_table_holds_the_units_that_matter_most_without_a_minus_before_zero() -> None:
    assert repr(CREDIT).splitlines()[0] == "Credit of 2 completions, 1 scored, by 2 units"
    rows = [row.split() for row in repr(CREDIT).splitlines()[2:]]
    assert rows == [["0", "<b>", "0.000", "0.50"], ["0", "2", "13.900", "4.00"]]
    spans = [Span(t, t + 1) for t in range(40)]
    many = repr(Credit([torch.ones(40)], [None], [spans], [torch.arange(40.0)], torch.zeros(1), None)).splitlines()
    assert (len(many), many[-1].strip()) == (13, "and 30 more")
    assert "0 scored" in repr(replace(CREDIT, drop=[torch.zeros(0)] * 2))  # weights were drawn
    assert "tokens 0 to 0" in repr(pickle.loads(pickle.dumps(CREDIT)))  # texts stay where the tokenizer is


def test_a_table_shows_the_weight_of_a_units_last_token_as_its_first_may_count_as_outside() -> None:
    opened = replace(CREDIT, weights=[torch.tensor([1.0, 4.0, 4.0])], spans=[[Span(0, 3)]], drop=[torch.ones(1)])
    assert repr(opened).split()[-1] == "4.00"


def test_a_notebook_shows_judged_completions_shaded_as_far_as_a_weight_is_from_one_and_escaped() -> None:
    page = CREDIT._repr_html_()
    tokens = re.findall(r'/ (.*?)\)" title="(.*?)">(.*?)</span>', page, re.DOTALL)
    assert tokens == [("0.620", "0.5", "&lt;b&gt;"), ("0.000", "1", " and "), ("0.620", "4", "2\n")]
    assert page.count("<pre>") == 1
