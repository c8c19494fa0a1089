"""What the host does in a step's credit beside the model: calls are counted, CPU milliseconds only printed."""

import re
import sys
import time
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cfa_kernels import Batch, CounterfactualConfig, DeferredCredit, credited_loss, packed_forward
from cfa_kernels.credit import assign
from cfa_kernels.model import lora, quantised
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.scoring import masked, packed
from cfa_kernels.text import offsets
from tests.support.log_prob_hosts import batch_rows
from tests.support.tiny import tiny_model, tiny_tokenizer

IS_CHECK = re.compile(
    r"check(?!point)|refuse|token_ids|as_numbers|span_inside|smallest_budget|should_validate|Interval"
)
ROWS = batch_rows()
BATCH = Batch(ROWS, advantages=torch.tensor([1.0, -0.5, 0.3, 0.7, -1.0, 1.0]))


@pytest.mark.parametrize("options", [{}, {"estimator": "prefix_gain"}], ids=str)
def test_credit_asks_once_for_the_batch_and_reads_text_while_the_forward_runs(options, monkeypatch):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))
    causal, calls, events = causal_lm(model), Counter(), []

    def counted(owner, name):
        function = getattr(owner, name)

        def run(*args, **kwargs):
            calls[name] += 1
            events.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    dtype = packed.PackedForward.dtype
    monkeypatch.setattr(packed.PackedForward, "dtype", property(lambda self: calls.update(dtype=1) or dtype.fget(self)))
    for owner, name in (
        (ModelWalk, "__init__"), (ModelWalk, "holds"), (quantised, "is_quantised"), (lora, "_plain"),
        (assign, "find_units"), (offsets.Decoder, "offsets"),
        (packed, "packed_hidden"), (masked, "packed_hidden"),
    ):  # fmt: skip
        counted(owner, name)
    config = CounterfactualConfig.of(options)
    for _ in range(2):  # the first checks the model and keeps the walk, and what is derived from it
        calls.clear()
        events.clear()
        credit, began = DeferredCredit(config, tiny_tokenizer(), BATCH, seed=0), time.process_time()
        credit.by_forward(range(6), packed_forward(causal, ROWS, keep_states=True))
        took = time.process_time() - began
    assert credit.finished().work is not None
    assert (calls["__init__"], calls["is_quantised"], calls["_plain"]) == (0, 0, 0)
    assert calls["holds"] <= 7
    assert calls["dtype"] == calls["find_units"] == 1
    assert calls["offsets"] == 6 + len({tuple(prompt.tolist()) for prompt in ROWS.prompts})  # each prompt once
    assert events.index("find_units") > events.index("packed_hidden")
    print(f"{options}: {took * 1e3:.1f} CPU ms with the model, {dict(calls)}")


CALLS, CHECKS = 1200, 76
"""Functions of the library that one `credited_loss` of two rows may call, and those of them that check something."""


def test_a_loss_of_two_rows_is_checked_once():
    model, rows, calls = tiny_model(), ROWS.take([0, 3]), Counter()
    options = {"credit": CounterfactualConfig(), "advantages": torch.tensor([1.0, 0.7]), "loss_type": "dapo"}
    credited_loss(model, tiny_tokenizer(), rows, **options)  # the first checks the model, and keeps what it found

    def follow(frame, event, _):
        code = frame.f_code
        if event == "call" and "/cfa_kernels/" in code.co_filename and not code.co_name.startswith("<"):
            calls[code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        credited_loss(model, tiny_tokenizer(), rows, **options)
    finally:
        sys.setprofile(before)
    checks = {name: count for name, count in calls.items() if IS_CHECK.search(name)}
    print(f"{sum(calls.values())} calls, {sum(checks.values())} checks: {checks}")
    assert sum(checks.values()) <= CHECKS
    assert sum(calls.values()) <= CALLS
