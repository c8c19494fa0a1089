"""Records of completions with their credit."""

from types import SimpleNamespace
from typing import Any

import torch

from cfa_kernels import Credit, Span
from tests.support.embedded import settings
from trainer.analyze.records import completion_record


def record_of(drop: list[float]) -> dict[str, Any]:
    spans, weights = [Span(0, 2), Span(2, 3)], torch.tensor([1.0, 4.0, 0.5])
    credit = Credit([weights], [None], [spans], [torch.tensor(drop)], torch.zeros(1), None)
    rollouts = SimpleNamespace(ids=lambda: [[5, 6, 7]], texts=["567"], truncated=[False])
    batch = SimpleNamespace(rows=[{}], problems=[0], rewards=torch.ones(1), rollouts=rollouts)
    result = SimpleNamespace(batch=batch, credit=credit, advantages=torch.ones(1))
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(str, ids)))
    return completion_record(result, 0, tokenizer, settings())


def test_a_record_holds_the_weight_of_a_spans_last_token_as_its_first_may_count_as_outside() -> None:
    spans = record_of([2.0, 1.0])["spans"]
    assert [(span["text"], span["weight"]) for span in spans] == [("56", 4.0), ("7", 0.5)]


def test_units_whose_weights_are_drawn_have_no_drop_to_record() -> None:
    record = record_of([])
    assert (record["spans"], record["weights"]) == ([], [1.0, 4.0, 0.5])
