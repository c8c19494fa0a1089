"""The benchmarks themselves: peers do the same job, wrong answers get no time, result files hold what they must."""

import functools
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import workloads
from benchmarks.harness.counting import attention_flops, counted, tree_pairs
from benchmarks.harness.race import Absent, Budget, Contender, WrongAnswer, race
from benchmarks.harness.workloads import Job, Span, gsm8k_job, random_model, shaped_job
from benchmarks.speed import bench_kernels, command
from benchmarks.speed.loss_jobs import LINEAR
from benchmarks.speed.peers import PEERS, REFERENCE, Peer, packed_forest, per_span
from benchmarks.speed.reference import Reference
from tests.support.runs import printed

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


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", [name for name in PEERS if name != REFERENCE])
def test_each_peer_agrees_with_one_full_forward_per_span(name, model, job, reference):
    peer = PEERS[name]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiling takes longer than all the rest
            observed = peer.run(model, job)
    except Absent as error:
        pytest.skip(str(error))
    assert reference.check(peer, job, observed, torch.float32)["error_over_budget"] <= 1


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
    assert command.main(["--results", str(tmp_path)]) != 0
    assert "no CUDA or HIP device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_result_file_holds_what_a_reader_needs_to_trust_a_figure(tmp_path, monkeypatch):
    run = subprocess.run

    def forked(line, **options):
        if line[0] != sys.executable:  # git
            return run(line, **options)
        assert line[1:3] == ["-m", "pytest"]
        return SimpleNamespace(returncode=printed(pytest.main, line[3:])[0])

    monkeypatch.setattr(subprocess, "run", forked)
    arguments = ["--device", "cpu", "--smoke", "--rounds", "1", "--seconds", "0", "--results", str(tmp_path)]
    arguments += ["--only", "scoring", "--select", "tiny", "--peers", "ours"]
    assert command.main(arguments) == 0
    (file,) = tmp_path.glob("*.json")
    document = json.loads(file.read_text())
    environment = document["environment"]
    assert {"date", "device", "driver", "versions", "commit", "dirty", "seeds", "data"} <= environment.keys()
    assert {"python", "torch", "triton", "transformers"} <= environment["versions"].keys()
    assert {"copy_gb_per_s", "gemm_tflop_per_s"} <= document["ceilings"].keys()
    scoring = document["parts"]["scoring"]
    assert (scoring["commit"], scoring["select"], scoring["refused"]) == (environment["commit"], "tiny", [])
    assert [figure["name"] for figure in scoring["figures"]] == ["ours"]
    for figure in scoring["figures"]:
        assert {"median", "iqr", "min", "max", "rounds"} <= figure["seconds"].keys()
        assert figure["tflop_per_s"] == pytest.approx(figure["flops"] / figure["seconds"]["median"] / 1e12)
        share = figure["tflop_per_s"] / document["ceilings"]["gemm_tflop_per_s"]
        assert figure["share_of_gemm"] == pytest.approx(share)


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


KILLED = """
import os, signal
from benchmarks.harness.race import Lap


def test_a_finished_race(report):
    report(Lap("ours", [1.0, 3.0, 2.0]), group="finished")


def test_a_failure():
    assert False


def test_a_race_under_way():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_session_leaves_the_races_it_had_finished_beside_other_parts(tmp_path):
    file, result = tmp_path / "test_file.py", tmp_path / "result.json"
    file.write_text(KILLED)
    result.write_text(json.dumps({"schema": 1, "parts": {"loss": {"figures": []}}}))
    options = command.Options(device="cpu", smoke=True, commit="abc")
    line = [str(file) if "bench_step" in word else word for word in command.session("step", options, result)]
    assert printed(pytest.main, [*line[3:], "-p", "benchmarks.speed.conftest"]) == (-signal.SIGKILL, "")
    parts = json.loads(result.read_text())["parts"]
    assert parts.keys() == {"loss", "step"}
    assert [(f["group"], f["seconds"]["median"]) for f in parts["step"]["figures"]] == [("finished", 2.0)]
    assert [name.rpartition("::")[2] for name in parts["step"]["failed"]] == ["test_a_failure"]


def test_a_workload_is_raced_once_for_all_its_contenders():
    """Contenders of several races would not have taken turns."""
    files = [f"benchmarks/speed/bench_{part}.py" for part in ("kernels", "loss", "step")]
    options = ["-p", "no:cacheprovider", "--bench-device=cpu", "--bench-smoke", "--setup-plan", "-s"]
    status, plan = printed(pytest.main, [*files, *options])
    assert status == 0
    made = [words[2] for line in plan.splitlines() if len(words := line.split()) > 2 and words[:2] == ["SETUP", "M"]]
    assert {name: made.count(name) for name in ("kernel_race", "laps", "step_race")} == {
        "kernel_race": len(bench_kernels.KERNELS["smoke"]), "laps": len(LINEAR["smoke"]), "step_race": 1,
    }  # fmt: skip
