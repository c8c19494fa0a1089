"""The host does not wait for the device between packs, nor in a loss: one look at the results, at the end."""

import warnings
from unittest import mock

import numpy as np
import pytest
import torch

from cfa_kernels import Batch, CounterfactualConfig, DeferredCredit, credited_loss, packed_policy_loss
from cfa_kernels.estimators import gradient
from cfa_kernels.loss.ragged import LossBatch
from cfa_kernels.model import decode_attention, tree_forward
from cfa_kernels.model.check.verify import check_trainable
from cfa_kernels.ops.upload import upload
from cfa_kernels.rows import Rows, keyed_generator
from cfa_kernels.scoring import masked
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.scoring.packed import PackedForward, packed_forward
from cfa_kernels.tree import packs
from tests.support.log_prob_hosts import batch_rows
from tests.support.models import PLACEHOLDER, batch, batch_of, make_model, score_columns, score_forward
from tests.support.tiny import tiny_tokenizer
from tests.support.waits import DEVICE, Waits, a_device, put_on_device
from trainer.rollouts import decoding, prompts

pytestmark = [pytest.mark.slow, pytest.mark.traced]  # one stand-in for a GPU is enough


def checked(name, **options):
    """A model on no device yet, and checked, which looks at results by its nature."""
    made = make_model(name, **options)
    check_trainable(made)
    return made


@pytest.fixture(params=["Qwen3", "Gemma3Text"])  # without and with sliding windows
def model(request):
    return checked(request.param, num_hidden_layers=2)


def assert_waits(waits: Waits, *causes: str) -> None:
    """That the host waited so often, and for nothing but this; the next count starts at 0."""
    assert [seen.split(" at ")[0] for seen in waits.seen] == list(causes), waits.seen
    waits.seen.clear()


@pytest.mark.parametrize(
    ("cause", "name"),
    [
        (lambda x: x.sum().item(), "aten::_local_scalar_dense"), (lambda x: bool(x.any()), "aten::_local_scalar_dense"),
        (lambda x: x.nonzero(), "aten::nonzero"), (lambda x: x[x > 0], "boolean index"),
        (lambda x: x[torch.arange(2)], "upload of an index"), (lambda x: x.tolist(), "tolist"),
        (lambda x: x.to("cpu"), "to(cpu)"),
        (lambda x: torch.ones(2).to(x.device, non_blocking=True), "upload from pageable memory"),
        (lambda x: torch.ones(2).pin_memory().to(x.device), "blocking upload"),
        (lambda x: torch.tensor([1.0], device=x.device), "blocking upload"),
        (lambda x: torch.as_tensor(1.0, device=x.device), "blocking upload"), (lambda x: x.unique(), "aten::_unique2"),
        (lambda x: torch.segment_reduce(x, "mean", lengths=x.new_ones(3, dtype=torch.int64)), "aten::segment_reduce"),
        (lambda x: torch.empty(3).copy_(x), "download by copy_"),
    ],
)  # fmt: skip
def test_a_wait_is_seen(cause, name):
    with a_device() as waits:
        x = torch.arange(3.0, device=DEVICE)
        assert not waits.seen
        cause(x)
        assert_waits(waits, name)


@pytest.mark.parametrize(  # under a cap, a divergence takes the logits themselves
    ("outcome", "softcap", "budget"),  # completions are over it, or completions with their branches
    [("logprob", None, 20), ("mean", None, 60), ("mean", 4.0, 20)],
)
def test_scoring_looks_once_however_many_packs_there_are(outcome, softcap, budget):
    model = checked("Gemma2", final_logit_softcapping=softcap, num_hidden_layers=2)
    options = {"mask": PLACEHOLDER, "token_budget": budget, "outcome": outcome}
    expected = score_columns(model, *batch(), **options)
    with a_device() as waits:
        scores = score_columns(put_on_device(model), *batch(), **options)
        assert scores.work.forwards >= 4
        assert_waits(waits, "cpu")
    for column in ("base", "drop", "masked"):
        ours, theirs = (getattr(one, column) for one in (scores, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("outcome", ["last", "mean", "mean_logprob"])
def test_gradients_at_the_embeddings_look_once_however_many_packs_and_draws_there_are(outcome, monkeypatch):
    model = checked("Gemma2", final_logit_softcapping=4.0, num_hidden_layers=2)
    # A device that is not there has no random numbers of its own.
    monkeypatch.setattr(gradient, "keyed_generator", lambda *key, device: keyed_generator(*key))
    with a_device() as waits:
        put_on_device(model)
        rows = batch_of(model, *batch(), token_budget=60)
        result = gradient.Gradient(outcome, samples=2)(InProcess(model), rows)
        assert result.work.forwards >= 6
        assert_waits(waits, "cpu")


def test_a_training_forward_its_loss_and_backward_look_never_and_its_scores_once(model):
    prompts, completions, spans, answers = batch()
    rows = Rows(prompts, completions)
    loss_batch = LossBatch.of(rows, advantages=torch.ones(len(completions)), compute_entropy=True)
    with a_device() as waits:
        put_on_device(model.train())
        forward = packed_forward(model, rows, token_budget=120, keep_states=True)
        assert len(forward.packs) > 1
        assert_waits(waits)
        options = {"mask": PLACEHOLDER, "token_budget": 30, "outcome": "mean"}
        assert score_forward(forward, spans, answers, **options).work.forwards > 3
        assert_waits(waits, "cpu")
        forward.policy_loss(loss_batch).loss.backward(retain_graph=True)
        sum(row.sum() for row in forward.logprobs()).backward()
        assert_waits(waits)


ROWS = batch_rows()
BATCH = Batch(ROWS, advantages=torch.tensor([1.0, -0.5, 0.3, 0.7, -1.0, 1.0]), token_budget=10_000)
CF = {"preset": "cf"}


def queued(model, options, batch=BATCH, **given):
    """Credit of six completions, its weights as the loss takes them, and that loss, after its backward."""
    credit = DeferredCredit(CounterfactualConfig.of(options), tiny_tokenizer(), batch, seed=0, **given)
    forward = packed_forward(model, ROWS, keep_states=True, token_budget=10_000)
    credit.by_forward(range(6), forward, queues=True)
    columns = credit.columns(range(6))
    loss = forward.policy_loss(LossBatch.of(BATCH, compute_entropy=True, validate=False).credited(**columns)).loss
    loss.backward()
    return credit, columns["weights"], loss


@pytest.mark.parametrize(
    "options",
    [CF, {}, CF | {"control": "inverted", "normalize": "mean", "open_spans": True}, {"estimator.outcome": "mean"}],
    ids=range(4),
)
def test_loss_and_backward_of_masking_are_queued_before_its_scores_are_read(options, monkeypatch):
    monkeypatch.setattr(PackedForward, "dtype", torch.float32)  # weights of a class of their own count as quantised
    expected, _, expected_loss = queued(model := checked("Qwen3", vocab_size=20), options)
    theirs = expected.finished()
    with a_device() as waits:
        credit, weights, loss = queued(put_on_device(model), options)
        assert_waits(waits)
        ours = credit.finished()
        assert waits.seen
        assert all(torch.equal(there.inner, row) for there, row in zip(weights, ours.weights, strict=True))
        torch.testing.assert_close(loss.inner, expected_loss, rtol=0, atol=1e-4)
    for name in ("weights", "drop", "base"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-3, equal_nan=True)
    assert (ours.spans, ours.answers, ours.work) == (theirs.spans, theirs.answers, theirs.work)
    assert ours.metrics() == pytest.approx(theirs.metrics(), abs=1e-3)
    assert any((row != 1).any() for row in ours.weights)


WEIGHED = BATCH.with_columns(weights=[torch.full((n,), 0.5) for n in ROWS.lengths])


@pytest.mark.parametrize(
    ("options", "batch", "given"),
    [
        ({"weights": "bilevel"}, BATCH, {}), ({"estimator.preselect": 0.5}, BATCH, {}),
        ({"estimator.preselect": 0.5, "estimator.preselect_by": "masking"}, BATCH, {}),
        ({"control": "permuted"}, BATCH, {}), (CF, WEIGHED, {}), (CF, BATCH, {"gather": lambda value: [value]}),
    ],
    ids=range(6),
)  # fmt: skip
def test_scores_are_read_at_once_where_weights_need_the_host(options, batch, given):
    model = checked("Qwen3", vocab_size=20)
    with a_device() as waits:
        credit, weights, _ = queued(put_on_device(model), options, batch, **given)
        assert_waits(waits, *["cpu"] * (1 + ("estimator.preselect_by" in options)))
        assert all(torch.equal(own, row) for own, row in zip(weights, credit.finished().weights, strict=True))
        assert_waits(waits)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.nan, FloatingPointError, r"completions row \d: the model gave a nan log-prob"),
        (-torch.inf, ValueError, r"estimator, row \d, unit 0: must be finite, got (nan|inf)"),
    ],
)
def test_scores_that_are_not_finite_are_refused_where_they_are_read(value, error, message, monkeypatch):
    collect = masked._collect

    def damaged(*read):
        values, work = collect(*read)
        return values + upload([np.full(len(values), value, np.float32)], values.device)[0], work

    monkeypatch.setattr(masked, "_collect", damaged)
    model = checked("Qwen3", vocab_size=20)
    with a_device() as waits:
        credit, *_ = queued(put_on_device(model), CF)
        assert_waits(waits)
        for ask in (credit.read, lambda: credit.take([0]), credit.finished):  # as often as it is asked
            with pytest.raises(error, match=message):
                ask()


def test_one_call_reads_scores_after_its_loss_is_queued(monkeypatch):
    model, seen, loss = checked("Qwen3", vocab_size=20), [], PackedForward.policy_loss
    with a_device() as waits:

        def policy_loss(*args):
            result = loss(*args)
            seen.append(len(waits.seen))
            return result

        monkeypatch.setattr(PackedForward, "policy_loss", policy_loss)
        result = credited_loss(put_on_device(model), tiny_tokenizer(), BATCH, credit="cf", validate=False)
        assert seen == [0]
        assert waits.seen
    assert all(row.device.type == "cpu" for row in result.credit.weights)


def test_the_loss_of_a_batch_on_the_host_never_looks(model):
    prompts, completions, *_ = batch()
    with a_device() as waits:
        put_on_device(model.train())
        rows = [torch.zeros(len(ids)) for ids in completions]
        packed_policy_loss(
            model, Rows(prompts, completions), old_logprobs=rows, advantages=torch.ones(len(rows)),
            weights=[row + 1 for row in rows], ref_logprobs=rows, token_budget=120, beta=0.1, validate=False,
        ).loss.backward()  # fmt: skip
        assert_waits(waits)


@pytest.mark.parametrize("least", [1000, 4], ids=["prompts apart", "shared"])
def test_a_token_that_a_graph_would_hold_never_looks(least, model, monkeypatch):
    """A CUDA graph cannot be captured of what waits."""
    kernel, captured = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, []
    monkeypatch.setattr(prompts, "SHARED_FROM", least)
    monkeypatch.setattr(
        decode_attention, "_with_logsumexp", lambda q, k, v, bias, scale: kernel(q, k, v, attn_mask=bias, scale=scale)
    )
    with a_device() as waits, torch.no_grad():

        def capture(step, pool):
            waits.seen.clear()
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
                step()
            assert_waits(waits)
            captured.append(step)
            return step, None

        monkeypatch.setattr(decoding, "capture", capture)
        decoder = decoding.Decoder(put_on_device(model.eval()), captured=True)
        ids = torch.arange(30).remainder(7).expand(8, -1)
        sampling = decoding.Sampling(False, 1.0, 0.9, (1,), 0)
        decoder(ids, torch.ones_like(ids), torch.rand(8, 2).double(), sampling)
    assert captured


@pytest.mark.parametrize("budget", [60, 120])  # with packs that continue others, and without
def test_a_pack_is_laid_out_after_the_one_before_was_launched(budget, monkeypatch):
    model, events = checked("Qwen3"), []

    def noted(event, function):
        return lambda *args, **options: events.append(event) or function(*args, **options)

    launch = noted("launched", tree_forward.packed_hidden)
    for module in (tree_forward, masked):
        monkeypatch.setattr(module, "packed_hidden", launch)
    monkeypatch.setattr(packs, "pack_of", noted("laid out", packs.pack_of))
    score_columns(model, *batch(), mask=PLACEHOLDER, token_budget=budget)
    assert len(events) > 4
    assert events == ["laid out", "launched"] * (len(events) // 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("outcome", ["logprob", "mean"])
def test_pytorch_sees_one_wait_too_on_a_real_device(model, outcome):
    arguments, options = batch(), {"mask": PLACEHOLDER, "token_budget": 60, "outcome": outcome}
    score_columns(model, *arguments, **options)  # kernels are compiled
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert score_columns(model, *arguments, **options).work.forwards > 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in seen if "synchronizing" in str(one.message)]) == 1, [str(one.message) for one in seen]
