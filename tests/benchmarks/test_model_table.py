"""The table of model types: a sample still says what it says, its comparison can fail, broken-off runs go on."""

import dataclasses
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

import cfa_kernels
from benchmarks.harness.results import Pieces
from benchmarks.models import table as model_table
from benchmarks.models import verdicts as model_verdicts
from benchmarks.models.small_models import CONTEXT, WINDOW, Case, build, case, model_types
from benchmarks.models.table import ModelRow, judge, judged, main, markdown
from benchmarks.models.verdicts import (
    EXACT,
    NOT_BUILDABLE,
    NOT_JUDGED,
    REFUSED,
    TOLERANCE,
    UNCLEAR,
    WRONG,
    Plain,
    Verdict,
    judge_scores,
    judge_training,
    ragged_batch,
)
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

TABLE = json.loads((REPOSITORY / "benchmarks" / "results" / "models.json").read_text())
ROWS = {row.name: row for row in map(ModelRow.from_json, TABLE["rows"])}
SAME_VERSION = TABLE["versions"]["transformers"] == model_table.versions()["transformers"]
# Plain, sliding, masks that read a table of the rows, a mixture of experts, latent attention, sinks, two with linear
# attention, no attention interface.
SAMPLE = [
    "llama", "gemma2", "gemma4_unified", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "recurrent_gemma",
    "bloom",
]  # fmt: skip


@pytest.fixture(scope="module")
def llama():
    return build(Case("llama"))


def row(name="llama", scores=EXACT, trains=EXACT, why="", error=2e-6) -> ModelRow:
    model_type, _, variant = name.partition(", ")
    verdicts = [Verdict(status, why, error if status == EXACT else None) for status in (scores, trains)]
    return ModelRow(model_type, variant, "SomeForCausalLM", ["full_attention"], *verdicts, 1.5)


# The table


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_models_is_as_the_table_says(name):
    result = judge(case(name), seeds=(1,), complete=False)
    if not SAME_VERSION:  # other versions may refuse more or less, but never silently
        assert {result.scores.status, result.trains.status} <= {EXACT, REFUSED}
        return
    assert (result.scores.status, result.trains.status) == (ROWS[name].scores.status, ROWS[name].trains.status)
    assert result.layers == ROWS[name].layers


@pytest.mark.skipif(not SAME_VERSION, reason="the table is about another version of transformers")
def test_the_table_has_every_causal_model_type_of_transformers():
    assert sorted({row.model_type for row in ROWS.values()}) == model_types()


def test_nothing_in_the_table_is_wrong_or_unclear():
    assert not [row.name for row in ROWS.values() if {row.scores.status, row.trains.status} & {WRONG, UNCLEAR}]


def test_the_page_is_written_from_the_result():
    assert (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8") == markdown(TABLE)


def test_masking_a_span_moves_answers_far_more_than_the_table_allows_for_errors():
    assert min(row.median_drop for row in ROWS.values() if row.median_drop is not None) > 50 * TOLERANCE


# Small models


def test_a_hybrid_cut_before_its_first_attention_layer_is_not_taken_for_the_type():
    result = judge(Case("jamba", changes={"num_hidden_layers": 2}))
    assert result.scores.status == result.trains.status == NOT_BUILDABLE
    assert "JambaAttention" in result.scores.why
    assert "full_attention" in result.scores.why


@pytest.mark.parametrize(
    ("name", "size"),
    [("mistral", "sliding_window"), ("gemma2", "sliding_window"), ("llama4_text", "attention_chunk_size")],
)
def test_the_windows_of_a_small_model_change_its_result(name, size):
    batch = ragged_batch(0)
    ids = torch.cat([batch.rows.prompts[0], batch.rows.completions[0]])
    narrow, wide = (Plain(build(Case(name, changes={size: tokens}))).logprobs(ids) for tokens in (WINDOW, CONTEXT))
    assert torch.equal(narrow[: WINDOW - 1], wide[: WINDOW - 1])
    assert (narrow - wide)[WINDOW:].abs().max() > 100 * TOLERANCE


# Verdicts


def test_scores_of_another_placeholder_are_wrong(llama, monkeypatch):
    def score(*batch, mask, **options):
        return real(*batch, mask=mask + 1, **options)

    real = model_verdicts.score_counterfactuals
    monkeypatch.setattr(model_verdicts, "score_counterfactuals", score)
    verdict, median = judge_scores(llama, Plain(llama), [ragged_batch(0)])
    assert verdict.status == WRONG
    assert verdict.error > 100 * TOLERANCE
    assert median > 0


def test_log_probs_of_a_trainer_that_forgets_the_temperature_are_wrong(llama, monkeypatch):
    real = model_verdicts.packed_logprobs
    monkeypatch.setattr(model_verdicts, "packed_logprobs", lambda *batch, temperature: real(*batch, temperature=1.0))
    assert judge_training(llama, Plain(llama), [ragged_batch(0)]).status == WRONG


def test_gradients_that_are_one_percent_off_are_wrong_though_log_probs_are_right(llama, monkeypatch):
    def logprobs(*batch, temperature):
        rows = real(*batch, temperature=temperature)
        return [row + 0.01 * (row - row.detach()) for row in rows]

    real = model_verdicts.packed_logprobs
    monkeypatch.setattr(model_verdicts, "packed_logprobs", logprobs)
    verdict = judge_training(llama, Plain(llama), [ragged_batch(0)])
    assert verdict.status == WRONG
    assert verdict.error <= TOLERANCE
    assert verdict.gradient_error == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(
    ("gap", "rounding", "status"), [(9e-5, None, EXACT), (5e-4, 1e-4, EXACT), (5e-4, 1e-6, WRONG), (2e-2, 1.0, WRONG)]
)
def test_a_larger_gap_is_right_where_the_models_own_rounding_explains_it(llama, monkeypatch, gap, rounding, status):
    monkeypatch.setattr(model_verdicts, "gradient_gap", lambda *_: gap)
    monkeypatch.setattr(model_verdicts, "plain_gradients", lambda *_: {})
    monkeypatch.setattr(model_verdicts, "rounding_of_gradients", rounding and (lambda *_: rounding))  # None: not asked
    assert judge_training(llama, Plain(llama), [ragged_batch(0)]).status == status


def test_a_gradient_that_is_nan_or_missing_is_not_a_small_gap(llama):
    gradient_gap = model_verdicts.gradient_gap
    theirs = model_verdicts.plain_gradients(llama, ragged_batch(0))
    nothing = {name: torch.zeros_like(gradient) for name, gradient in theirs.items()}
    assert gradient_gap(theirs, theirs) == 0
    assert gradient_gap(nothing, theirs) == pytest.approx(1)
    assert gradient_gap({name: gradient * torch.nan for name, gradient in theirs.items()}, theirs) == float("inf")


@pytest.mark.parametrize("seed", model_table.SEEDS)
def test_the_batches_have_what_a_tree_of_short_pieces_has(seed):
    batch = ragged_batch(seed).rows
    rows = [
        *zip(*([tuple(row.tolist()) for row in column] for column in (batch.prompts, batch.completions)), strict=True)
    ]
    of_one_prompt = [(a, b) for i, (p, a) in enumerate(rows) for j, (q, b) in enumerate(rows) if i != j and p == q]
    assert any(a == b for a, b in of_one_prompt)
    assert any(len(a) < len(b) and b[: len(a)] == a for a, b in of_one_prompt)
    assert any(a[0] == b[0] and a[1:2] != b[1:2] and len(a) > 2 < len(b) for a, b in of_one_prompt)
    assert any(a[:2] == b[:2] and a[2:3] != b[2:3] and len(a) > 3 < len(b) for a, b in of_one_prompt)
    assert any(len(completion) == 1 for _, completion in rows)
    assert sum(len(prompt) == 1 for prompt, _ in rows) > 2


def raised(kind: str, message: str, file: Path):
    """A function that raises `kind(message)` as if it stood in `file`."""
    scope: dict = {}
    exec(compile(f"def raises(*_, **__): raise {kind}({message!r})", str(file), "exec"), scope)
    return scope["raises"]


@pytest.mark.parametrize(
    ("kind", "message", "folder", "status"),
    [
        ("NotImplementedError", "model: LlamaForCausalLM has sinks", Path(cfa_kernels.__file__).parent, REFUSED),
        ("NotImplementedError", "LlamaAttention has sinks", Path(cfa_kernels.__file__).parent, UNCLEAR),
        ("ValueError", "model: LlamaForCausalLM has sinks", Path(cfa_kernels.__file__).parent, UNCLEAR),
        ("NotImplementedError", "LlamaForCausalLM has sinks", Path(torch.__file__).parent, UNCLEAR),
    ],
    ids=["named", "layer named", "another error", "raised elsewhere"],
)
def test_only_a_named_refusal_of_this_package_counts_as_one(llama, monkeypatch, kind, message, folder, status):
    raises = raised(kind, message, folder / "some_file.py")
    monkeypatch.setattr(model_verdicts, "score_counterfactuals", raises)
    monkeypatch.setattr(model_verdicts, "packed_logprobs", raises)
    assert judge_scores(llama, Plain(llama), [ragged_batch(0)]) == (Verdict(status, f"{kind}: {message}"), None)
    assert judge_training(llama, Plain(llama), [ragged_batch(0)]) == Verdict(status, f"{kind}: {message}")


# Runs


def pretend(name):
    """A worker that dies or never ends for some."""
    if name == "llama":
        os._exit(7)
    if name == "bloom":
        time.sleep(600)
    return dataclasses.asdict(row(name))


def test_rows_are_judged_once_and_a_process_that_dies_or_never_ends_leaves_one_that_says_so(tmp_path):
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("processes cannot fork here")
    pieces = Pieces(tmp_path, {}, {"environment": {"commit": "abc"}})
    options = {"processes": 3, "seconds": 2.0, "start_method": "fork"}
    todo = [Case(name) for name in ("mamba", "llama", "bloom")]
    rows = {one.name: one for one in judged(todo, pieces, worker=pretend, **options)}
    assert rows["mamba"] == row("mamba")
    assert (
        rows["llama"].scores == rows["bloom"].trains == Verdict(NOT_JUDGED, "its process died, or took longer than 2 s")
    )
    assert {one.name: one for one in judged(todo, pieces, worker=None, **options)} == rows


def test_the_table_is_written_of_all_types_and_some_are_only_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model_table, "model_types", lambda: ["a", "b"])
    monkeypatch.setattr(model_table, "cases", lambda name: [Case(name)])
    wrong = {"b"}

    def some(todo, pieces, **_):
        return [row(of.name, scores=WRONG if of.name in wrong else EXACT) for of in todo]

    monkeypatch.setattr(model_table, "judged", some)
    files = {name: tmp_path / f"models.{name}" for name in ("folder", "json", "markdown")}
    arguments = [f"--{name}={path}" for name, path in files.items()] + ["--date=2020-02-02"]
    assert main([*arguments, "--only", "a"]) == 0
    assert not files["json"].exists()
    assert main(arguments) == 1  # of what is wrong in it
    result = json.loads(files["json"].read_text())
    assert (result["date"], len(result["rows"])) == ("2020-02-02", 2)
    assert files["markdown"].read_text() == markdown(result)
    wrong.clear()
    assert main(arguments) == 0
    with pytest.raises(SystemExit):
        main([*arguments, "--only", "a", "c"])
    assert "no such type or row: c" in capsys.readouterr().err
