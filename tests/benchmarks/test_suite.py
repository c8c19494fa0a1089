"""The benchmarks themselves: peers do the same job, wrong answers get no time, result files hold what they must."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import conftest
from benchmarks.harness import workloads
from benchmarks.harness.counting import attention_flops, counted, tree_pairs
from benchmarks.harness.race import Absent, Budget, Contender, Lap, Race, WrongAnswer, race
from benchmarks.harness.workloads import Job, Span, gsm8k_job, random_model, shaped_job
from benchmarks.speed import bench_kernels, bench_loss, bench_scoring, bench_step, bench_turns, command
from benchmarks.speed.peers import PEERS, REFERENCE, Peer, packed_forest, per_span
from benchmarks.speed.reference import Reference
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3-tiny", device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def job() -> Job:
    return gsm8k_job(1)


@pytest.fixture(scope="module")
def reference(model, job) -> Reference:
    return Reference.of(model, job)


# Peers


@pytest.mark.parametrize("name", [REFERENCE, "aligntune batched"])
def test_a_span_shifted_by_one_token_is_refused_in_every_peers_terms(name, model, job, reference):
    peer = PEERS[name]
    shifted = [[Span(max(s.start - 1, 0), s.end - 1) for s in row] for row in job.spans]
    wrong = Job(**{**vars(job), "spans": shifted})
    observed = [peer.view(scores.double(), job, b) for b, scores in enumerate(per_span(model, wrong))]
    with pytest.raises(WrongAnswer, match="expected"):
        reference.check(peer, job, observed, torch.float32)


@pytest.mark.parametrize("spoil", [lambda x: x * torch.nan, lambda x: x[1:]], ids=["nan", "one missing"])
def test_unusable_results_are_refused(spoil, job, reference):
    observed = [spoil(scores) for scores in reference.truth]
    with pytest.raises(WrongAnswer):
        reference.check(PEERS[REFERENCE], job, observed, torch.float32)


def test_drops_are_far_larger_than_the_budget_so_the_check_can_see_them(reference):
    assert reference.sharpness() > 100


# Workloads


def test_every_completion_ends_with_its_answer_and_no_span_touches_it(job):
    for completion, answer, spans in zip(job.completions, job.answers, job.spans, strict=True):
        assert answer.end == len(completion)
        assert spans
        assert all(0 <= span.start < span.end < answer.start for span in spans)


def test_without_real_data_jobs_are_made_of_generated_text_and_say_so(monkeypatch):
    monkeypatch.setattr(workloads, "gsm8k_folder", lambda: None)
    for name in ("corpus", "tokenizer", "_marker_id"):  # the others keep theirs
        monkeypatch.setattr(workloads, name, functools.cache(getattr(workloads, name).__wrapped__))
    job = gsm8k_job(2)
    assert job.source.startswith("generated")
    assert job.describe()["distinct_prompts"] == 2
    assert job.describe()["spans_mean"] >= 2


# Counting


def test_counted_work_of_full_forwards_is_what_their_lengths_say(model):
    job = shaped_job(group=2, prompt=10, completion=40, spans=2)
    with counted(model) as work:
        per_span(model, job)
    forwards, length = 2 * 3, 50
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    pairs = length * (length + 1) / 2
    assert (work.forwards, work.tokens_fed, work.head_rows) == (forwards, forwards * length, forwards * length)
    assert work.flops == forwards * (2 * weights * length + attention_flops(model.config, pairs))


def test_visible_pairs_of_the_tree_are_those_of_its_mask(job):
    forest = packed_forest(job)
    same = forest.segment[:, None] == forest.segment[None, :]
    causal = same & (forest.offset[None, :] <= forest.offset[:, None])
    inherited = forest.offset[None, :] < forest.visible[forest.segment][:, forest.segment]
    assert tree_pairs(job) == int((causal | inherited).sum())


# Races


def test_a_wrong_contender_and_an_absent_one_get_no_time():
    def wrong(result):
        raise WrongAnswer("off by one")

    def missing():
        raise Absent("no such package")

    def crash():
        raise RuntimeError("first line\nsecond line")

    laps = race(
        [
            Contender("ok", int, lambda _: {"tokens_fed": 3}), Contender("wrong", int, wrong),
            Contender("gone", missing, wrong), Contender("crash", crash, wrong),
        ],
        device=CPU,
        budget=Budget(0.0, 3, 4),
    )  # fmt: skip
    assert len(laps["ok"].seconds) == 3
    assert laps["ok"].facts == {"tokens_fed": 3}
    assert (laps["wrong"].seconds, laps["wrong"].refused) == ([], "off by one")
    assert (laps["gone"].seconds, laps["gone"].absent) == ([], "no such package")
    assert (laps["crash"].seconds, laps["crash"].refused) == ([], "raised RuntimeError: first line")


def test_contenders_take_turns_and_none_is_always_first():
    order = []
    contenders = [Contender(name, lambda name=name: order.append(name), lambda _: None) for name in "ab"]
    race(contenders, device=CPU, budget=Budget(0.0, 2, 2))
    assert order[-4:] == ["a", "b", "b", "a"]


# The command


def test_without_a_gpu_the_command_says_so_and_fails(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--into", str(tmp_path / "run.json")]) != 0
    assert "no CUDA or HIP device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


OPTIONS = ["--benchmark-only", "--bench-device=cpu", "--bench-smoke", "--bench-commit=abc", "-q"]


def suite(*options: str, path: str = "benchmarks") -> tuple[int, str]:
    """Run the suite, or a file of it, in a process that knows nothing of this one's pytest."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", str(REPOSITORY / path), *OPTIONS, *options]
    done = subprocess.run(command, cwd=REPOSITORY, env=own, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[list[dict], dict, list[str]]:
    """The benchmarks of a run of the whole suite, its document, and options that keep runs beside it."""
    folder = tmp_path_factory.mktemp("smoke")
    store = [f"--benchmark-storage=file://{folder}/runs", "--benchmark-autosave", f"--benchmark-json={folder}/run.json"]
    status, text = suite(*store)
    assert status == 0, text[-3000:]
    document = json.loads((folder / "run.json").read_text())
    return document["benchmarks"], document, store


@pytest.mark.filterwarnings("ignore")
def test_the_suite_runs_every_contender_in_a_group_by_workload_and_says_where(smoke):
    benchmarks, document, _ = smoke
    names = {(one["fullname"].rpartition("/")[2].partition(".")[0], one["params"]["name"]) for one in benchmarks}
    for module in (bench_kernels, bench_loss, bench_scoring, bench_step, bench_turns):
        own = {name for file, name in names if file == module.__name__.rpartition(".")[2]}
        assert {name for name in own if name.startswith("ours")} == {x for x in module.NAMES if x.startswith("ours")}
        assert len(own) >= 3
    assert "node" not in document["machine_info"]
    assert {"device", "driver", "versions", "seeds", "data"} <= document["machine_info"].keys()
    assert document["commit_info"]["id"] == "abc"


@pytest.mark.filterwarnings("ignore")
def test_what_a_contender_reports_are_numbers_beside_their_ceilings(smoke):
    benchmarks, _, _ = smoke
    for one in benchmarks:
        info, stats = one["extra_info"], one["stats"]
        assert all(isinstance(value, int | float) for value in info.values())
        assert stats["rounds"] == 1
        if "flops" in info:
            assert info["tflop_per_s"] == pytest.approx(info["flops"] / stats["median"] / 1e12)
            assert info["ceiling_tflop_per_s"] > 0
        assert "ratio_to_ours" in info
        assert {"error_over_budget", "gradient_error", "error"} & info.keys() or "bare GEMMs" in one["name"]


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_compared_with_the_one_before(smoke):
    _, _, store = smoke
    kernels = "benchmarks/speed/bench_kernels.py"
    status, text = suite(store[0], "--benchmark-compare", "-k", "backward and ours", path=kernels)
    assert status == 0, text[-3000:]
    assert "(NOW)" in text
    assert "(0001_" in text


class Benchmark:
    """The fixture of pytest-benchmark as far as `report` uses it, with its clock."""

    def __init__(self):
        self.group, self.extra_info, self.seconds = None, {}, []

    def pedantic(self, target, rounds):
        for _ in range(rounds):
            began = conftest.race_clock()
            target()
            self.seconds.append(conftest.race_clock() - began)


def reported(race, name, rounds=2):
    benchmark, budget = Benchmark(), Budget(0.0, rounds, rounds)
    ceilings = {"gemm_tflop_per_s": 1.0, "copy_gb_per_s": 2.0}
    conftest.report.__wrapped__(benchmark, budget, ceilings)(race, name)
    return benchmark


def test_a_missed_promise_and_a_wrong_answer_fail_and_an_absent_contender_is_skipped():
    laps = {"ours": Lap("ours", [2.0]), "other": Lap("other", [4.0]), "wrong": Lap("wrong", refused="off by one")}
    race = Race("g", laps | {"gone": Lap("gone", absent="no such package")}, {}, floors={"other": 2.5})
    with pytest.raises(pytest.fail.Exception, match=r"other: 2.00 x ours, promised 2.5"):
        reported(race, "other")
    assert reported(race, "other", rounds=1).seconds == [2.0 * 2]  # one round is no measurement
    with pytest.raises(pytest.fail.Exception, match="off by one"):
        reported(race, "wrong")
    for name in ("gone", "unknown"):
        with pytest.raises(pytest.skip.Exception):
            reported(race, name)


def test_a_peer_that_only_ranks_tokens_is_held_to_the_same_budget(job, reference):
    """The budget of a view that stretches drops is stretched as much: an error of one tolerance passes, of 20 not."""
    peer: Peer = PEERS["aligntune batched"]
    tolerance = reference.tolerance(torch.finfo(torch.float32).eps)
    for factor, passes in ((0.5, True), (20.0, False)):
        observed = []
        for b, scores in enumerate(reference.truth):
            off = scores.clone()
            off[1] += factor * tolerance
            observed.append(peer.view(off, job, b))
        if passes:
            reference.check(Peer(peer.run, peer.view), job, observed, torch.float32)
        else:
            with pytest.raises(WrongAnswer):
                reference.check(Peer(peer.run, peer.view), job, observed, torch.float32)
