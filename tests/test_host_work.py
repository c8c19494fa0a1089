"""What the host does in a step's credit beside the model: calls are counted, CPU milliseconds only printed."""

import re
import sys
import time
from collections import Counter
from functools import cache

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cfa_kernels import Batch, CounterfactualConfig, DeferredCredit, credited_loss, packed_forward
from cfa_kernels.credit import assign
from cfa_kernels.loss.ragged import LossBatch
from cfa_kernels.model import lora, quantised
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.rows import Rows
from cfa_kernels.scoring import masked, packed
from cfa_kernels.span import Span
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


def counted_calls(run, until=None):
    """Count the functions of the library that `run` calls, by name, up to the first that is called `until`."""
    calls, before = Counter(), sys.getprofile()

    def follow(frame, event, _):
        code = frame.f_code
        if event == "call" and "/cfa_kernels/" in code.co_filename and not code.co_name.startswith("<"):
            if code.co_name == until:
                sys.setprofile(before)
            calls[code.co_qualname] += 1

    sys.setprofile(follow)
    try:
        result = run()
    finally:
        sys.setprofile(before)
    return calls, result


BEFORE_A_FORWARD, BEFORE_BRANCHES, BEFORE_A_LOSS = 240, 1070, 80
"""Functions that may be called before the training forward of 32 rows is launched, before that of their 192 branches,
and in a loss before its operator."""


def test_the_host_does_little_before_a_launch_and_checks_and_prepares_while_the_device_runs(monkeypatch):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))
    causal, drawn = causal_lm(model.train()), torch.Generator().manual_seed(0)
    prompts = [ids for ids in torch.randint(1, 19, (4, 9), generator=drawn) for _ in range(8)]
    rows = Rows(prompts, [*torch.randint(1, 19, (32, 40), generator=drawn)])
    spans = [[Span(5 * k, 5 * k + 3) for k in range(6)]] * 32
    batch = Batch(rows, units=spans, answers=[Span(35, 38)] * 32, advantages=torch.ones(32), token_budget=10**5)
    launched = "compiled_layers"  # the last that `packed_hidden` enters before it calls the model
    packed_forward(causal, rows, keep_states=True, token_budget=10**5).score(batch, mask=3)  # checks, and walks
    calls, forward = counted_calls(lambda: packed_forward(causal, rows, keep_states=True, token_budget=10**5), launched)
    assert sum(calls.values()) <= BEFORE_A_FORWARD, calls.most_common(20)
    assert not {"check_trainable", "active_noise"} & {*calls}
    prepared, order = cache(lambda: order.append("prepared") or LossBatch.of(batch)), []
    forward.meanwhile, on_host = prepared, packed.on_host
    monkeypatch.setattr(packed, "on_host", lambda *read: order.append("read") or on_host(*read))
    calls, _ = counted_calls(lambda: forward.score(batch, mask=3), launched)
    assert sum(calls.values()) <= BEFORE_BRANCHES, calls.most_common(20)
    assert not {"ModelState.holds", "LossBatch.of"} & {*calls}
    assert order == ["prepared", "read"]

    def loss():
        return forward.policy_loss(prepared().credited(weights=[torch.ones(40)] * 32))

    calls, _ = counted_calls(loss, "linear_policy_loss_op")
    assert sum(calls.values()) <= BEFORE_A_LOSS, calls.most_common(20)
    assert "LossBatch.of" not in calls


CALLS, CHECKS = 1200, 76
"""Functions of the library that one `credited_loss` of two rows may call, and those of them that check something."""


def test_a_loss_of_two_rows_is_checked_once():
    model, rows = tiny_model(), ROWS.take([0, 3])
    options = {"credit": CounterfactualConfig(), "advantages": torch.tensor([1.0, 0.7]), "loss_type": "dapo"}
    credited_loss(model, tiny_tokenizer(), rows, **options)  # the first checks the model, and keeps what it found

    calls, _ = counted_calls(lambda: credited_loss(model, tiny_tokenizer(), rows, **options))
    checks = {name: count for name, count in calls.items() if IS_CHECK.search(name)}
    print(f"{sum(calls.values())} calls, {sum(checks.values())} checks: {checks}")
    assert sum(checks.values()) <= CHECKS
    assert sum(calls.values()) <= CALLS
