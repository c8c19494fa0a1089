"""Records of completions with their credit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cfa_kernels import Credit, Span
from tests.support.embedded import settings
from trainer.report.report import completion_record, logged_rows


def record_of(
    drop: list[float], *flags: str, weights: tuple[float, ...] = (1.0, 4.0, 0.5), answer: Span | None = None,
    advantage: float = 1.0, truncated: bool = False, masked: bool = True,
) -> dict[str, Any]:  # fmt: skip
    spans = [Span(0, 2), Span(2, 3)] if masked else []
    credit = Credit([torch.tensor(weights)], [answer], [spans], [torch.tensor(drop)], torch.zeros(1), None)
    rollouts = SimpleNamespace(ids=lambda: [[5, 6, 7]], texts=["567"], truncated=[truncated])
    batch = SimpleNamespace(rows=[{}], keys=[(0, 1, 0, 0)], rewards=torch.ones(1), rollouts=rollouts)
    result = SimpleNamespace(batch=batch, credit=credit, advantages=torch.tensor([advantage]))
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(str, ids)))
    return completion_record(result, 0, tokenizer, settings("--credit=cf", *flags))


def test_half_of_what_is_logged_shows_credit_and_the_rest_is_spread_over_the_batch() -> None:
    right = [b % 16 < 8 for b in range(32)]  # which alone have spans
    assert logged_rows(right, 8) == [0, 1, 2, 3, 4, 11, 18, 25]
    assert logged_rows(right, 1) == [0]
    assert logged_rows([False] * 32, 4) == [0, 8, 16, 24]
    for count in (0, 32, 100):
        assert sorted(logged_rows(right, count)) == [*range(min(count, 32))]


@pytest.mark.parametrize(
    ("flags", "options", "reason"),
    [
        ([], {"truncated": True}, "it was cut off at the length limit, and the loss omits it"),
        (["--no_mask_truncated_completions"], {"truncated": True}, "no answer was found in it"),
        ([], {"advantage": 0.0, "answer": Span(2, 3)}, "it has no advantage: all completions of its group have one"),
        ([], {}, "no answer was found in it"),
        ([], {"answer": Span(2, 3)}, "no span was found before its answer"),
        ([], {"answer": Span(2, 3), "masked": True}, "its spans do not differ in importance"),
        (
            ["--credit=prefix_gain_positive"],
            {"advantage": -1.0, "answer": Span(2, 3)},
            "it is wrong, and completions=positive",
        ),
    ],
)
def test_a_completion_whose_tokens_weigh_the_same_says_why(flags, options, reason) -> None:
    record = record_of([], *flags, **{"masked": False, "weights": (1.0, 1.0, 1.0)} | options)
    assert record["uncredited"].startswith(reason)
    assert record["counted"] is not record["uncredited"].endswith("the loss omits it")
    assert record_of([], *flags, **options)["uncredited"] is None


def test_a_record_holds_the_weight_of_a_spans_last_token_and_nothing_of_credit_where_it_is_off() -> None:
    spans = record_of([2.0, 1.0])["spans"]  # a first token may count as outside
    assert [(span["text"], span["weight"]) for span in spans] == [("56", 4.0), ("7", 0.5)]
    off = record_of([], "--credit=none")
    assert not {"spans", "credit", "weights", "drops_unit", "uncredited", "answer"} & off.keys()
