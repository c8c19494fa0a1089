"""The ablation runs what is missing, pairs runs by seed and says what a t-test says."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.harness.results import Pieces
from benchmarks.research import ablation
from benchmarks.research.ablation import ARMS, PLACEBO, PLAIN, AblationSettings, compare, markdown, paired, run
from tests.support.embedded import SMALL
from tests.support.runs import printed

pytestmark = pytest.mark.slow

ENVIRONMENT = {"command": "ablation", "environment": {"commit": "abc"}}


def curve(accuracy, seconds, sampled=()):
    return {"step": [0, 10, 20], "accuracy": accuracy, "seconds": seconds, "reward": accuracy[1], "sampled": sampled}


CURVES = {
    PLAIN: [curve([0.5, 0.6, 0.7], [0, 10, 20], [0.4] * 3), curve([0.5, 0.5, 0.6], [0, 10, 20], [0.4] * 3)],
    "counterfactual": [
        curve([0.5, 0.8, 0.8], [0, 20, 40], [0.4, 0.6, 0.8]),
        curve([0.5, 0.7, 0.8], [0, 20, 40], [0.4] * 3),
    ],
}


def test_arms_are_compared_seed_by_seed():
    result = compare(CURVES)
    ours, plain = result["counterfactual"], result[PLAIN]
    assert plain["final"]["mean"] == pytest.approx(0.65)
    assert plain["area"]["mean"] == pytest.approx((0.6 + 0.525) / 2)
    assert ours["area"]["mean"] == pytest.approx((0.725 + 0.675) / 2)
    # By the 20 seconds that plain DAPO takes, this arm is half way.
    assert ours["area_seconds"]["mean"] == pytest.approx((0.65 + 0.6) / 2)
    assert (plain["steps_to_plain"], ours["steps_to_plain"]) == (20, 10)
    assert ours["against_plain"]["final"]["mean"] == pytest.approx(0.15)
    assert ours["against_plain"]["final"]["error"] == pytest.approx(0.05)
    assert ours["against_plain"]["final"]["p"] == pytest.approx(0.20483, abs=1e-4)  # t = 3, one degree of freedom
    assert ours["against_plain"]["reward"]["mean"] == pytest.approx(0.2)
    assert ours["against_plain"]["sampled"]["mean"] == pytest.approx(0.1)
    assert "against_plain" not in plain


def test_differences_that_do_not_scatter_have_no_error():
    assert paired([1, 2], [1, 2]) == {"mean": 0, "error": 0, "p": 1}
    assert paired([2, 3], [1, 2])["p"] == 0
    assert paired([2], [1]) == {"mean": 1, "error": None, "p": None}


def test_a_table_shows_what_runs_did_by_quarters_of_their_steps():
    quarters = {"reward": [0.5, 0.6], "entropy": [0.2, 0.1], "completions/mean_length": [46, 47], "ess": [1.0, 0.9]}
    curves = CURVES | {PLAIN: [row | {"quarters": quarters} for row in CURVES[PLAIN]]}
    document = ENVIRONMENT | {"settings": vars(AblationSettings(seeds=2)), "curves": curves, "arms": compare(curves)}
    *_, rule, row = markdown(document).strip().splitlines()
    assert row == f"| {PLAIN} | 0.500, 0.600 | 0.200, 0.100 | 46, 47 | 1.00, 0.90 |"
    assert rule.count("---") == 5
    assert "quarters" not in markdown(document | {"curves": CURVES})


def test_a_table_says_what_credit_gains_beyond_its_placebo():
    credit = "prefix gain where right, spans open"
    curves = {PLAIN: CURVES[PLAIN], PLACEBO: CURVES[PLAIN], credit: CURVES["counterfactual"]}
    document = ENVIRONMENT | {"settings": vars(AblationSettings(seeds=2)), "curves": curves, "arms": compare(curves)}
    said = f"*{credit}* less *{PLACEBO}*, mean over steps (p): +10.0 ± 10.0 (0.50) by sampling, +13."
    assert said in markdown(document)
    assert "less *" not in markdown(document | {"curves": CURVES})


def forked(line, **_):
    """A run of a program by `python -c` in a process that has imported what it needs."""
    assert line[:2] == [sys.executable, "-c"]
    code, out = printed(executed, line[2:])
    return SimpleNamespace(returncode=code, stderr=out)


def executed(line):
    sys.argv = ["-c", *line[1:]]
    try:
        exec(line[0], {})
    except SystemExit as ended:
        return ended.code or 0


def test_finished_runs_are_not_run_again(tmp_path, monkeypatch, capsys):
    size = AblationSettings(seeds=1, steps=2, eval_steps=1, eval_problems=4, eval_samples=2)
    small = [flag for flag in SMALL if not flag.startswith(("--eval", "--max_steps", "--device"))]
    pieces = Pieces(tmp_path / "pieces", {}, ENVIRONMENT)
    monkeypatch.setattr(ablation.subprocess, "run", forked)
    monkeypatch.setitem(ablation.ARMS, "entropy", [*ablation.ARMS["entropy"], *small])
    first = run(pieces, tmp_path, size, arms=["entropy"])
    assert capsys.readouterr().out.startswith("entropy-seed0: ")
    assert first["curves"]["entropy"][0]["step"] == [0, 1, 2]
    assert np.all(np.diff(first["curves"]["entropy"][0]["seconds"]) > 0)
    assert all(0 <= 8 * share == round(8 * share) for share in first["curves"]["entropy"][0]["sampled"])
    monkeypatch.setattr(ablation, "_train", None)
    again = run(pieces, tmp_path, size, arms=["entropy"])
    assert again == first == json.loads(json.dumps(first))


def test_no_run_begins_after_one_that_failed(tmp_path, monkeypatch):
    begun = []

    def train(place, flags, steps):
        begun.append(place.name)
        time.sleep(0.05)
        raise RuntimeError(f"{place.name}: no memory")

    monkeypatch.setattr(ablation, "_train", train)
    with pytest.raises(RuntimeError, match="entropy-seed0: no memory"):
        run(Pieces(tmp_path / "pieces", {}, ENVIRONMENT), tmp_path, AblationSettings(seeds=200), arms=["entropy"])
    assert len(begun) < 100


def test_each_arm_takes_the_rate_that_was_best_on_seeds_of_their_own(tmp_path, monkeypatch):
    """Of two arms one learns best at the low rate and one at the high; no tuning seed is counted again."""
    asked = []

    def train(place, flags, steps):
        given = dict(flag.split("=", 1) for flag in flags if "=" in flag)
        asked.append((int(given["--seed"]), given["--learning_rate"]))
        high, uniform = given["--learning_rate"] == "2e-4", "--credit=none" in flags
        assert given["--max_completion_length"] == "96"
        lines = Path(given["--eval_dataset"]).read_text().splitlines()
        assert len(lines) == 8
        assert json.loads(lines[0]).keys() == {"question", "answer"}
        return curve([0.5, 0.6, 0.9 if high == uniform else 0.7], [0, 1, 2])

    monkeypatch.setattr(ablation, "_train", train)
    size = AblationSettings(seeds=2, regime="plain", rates="1e-4 2e-4", tuning=3, eval_problems=8)
    document = run(Pieces(tmp_path / "pieces", {}, ENVIRONMENT), tmp_path, size, arms=[PLAIN, "CF where right"])
    assert {arm: figures["rate"] for arm, figures in document["arms"].items()} == {
        PLAIN: "2e-4",
        "CF where right": "1e-4",
    }
    assert sorted(asked) == sorted(
        [(seed, rate) for rate in ("1e-4", "2e-4") for seed in (0, 1, 2) * 2]
        + [(seed, rate) for rate in ("1e-4", "2e-4") for seed in (3, 4)]
    )
    assert "Regime plain" in markdown(ENVIRONMENT | document)
    assert "--model=benchmarks/research/assets" in document["flags"]
    del asked[:]
    size = AblationSettings(seeds=2, regime="plain", rates="1e-4", tuning=3, eval_problems=8, inner_steps=4)
    document = run(Pieces(tmp_path / "one", {}, ENVIRONMENT), tmp_path, size, arms=[PLAIN])
    assert asked == [(3, "1e-4"), (4, "1e-4")], "nothing is to be chosen between"
    assert document["arms"][PLAIN]["rate"] == "1e-4"
    assert "--num_iterations=4" in document["flags"]
    assert "30 steps with 4 optimizer steps each" in markdown(ENVIRONMENT | document)
    others = document | {"beside": {PLAIN: "abc"}}  # of a result whose arms are of several commits
    assert f"Runs at other commits: {PLAIN} abc." in markdown(ENVIRONMENT | others)
    with pytest.raises(ValueError, match="rates must be learning rates above 0, got '-1'"):
        AblationSettings(rates="1e-4 -1")
    with pytest.raises(ValueError, match="regime must be one of plain"):
        AblationSettings(regime="no")


def test_a_run_does_not_outlive_the_ablation(tmp_path):
    """Killed outright, it must not leave a training behind that writes where the next one does."""
    child = ablation._RUN.partition("from trainer")[0] + "import os; print(os.getpid(), flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    started.kill()
    started.wait()
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.01)
    raise AssertionError("the run is still there")


def test_shares_of_corrections_come_from_the_runs_steps(tmp_path):
    lines = [
        {"step": 0, "eval_accuracy": 0.5},
        {"step": 1, "step_time": 1.0, "corrections/fraction": 0.25, "corrections/right_fraction": 0.0},
        {"step": 2, "step_time": 1.0, "corrections/fraction": 0.75, "corrections/right_fraction": 0.5,
         "eval_accuracy": 0.5},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = ablation._curve(tmp_path, 2)
    assert curve["corrections"] == {"fraction": 0.5, "right_fraction": 0.25}
    document = {"settings": {"steps": 2, "seeds": 1, "eval_problems": 8}, "curves": {PLAIN: [curve]}} | ENVIRONMENT
    text = markdown(document | {"arms": compare(document["curves"])})
    assert "(50.0 % of completions got a correction, 25.0 % of the corrections were right)" in text


def test_every_arm_is_one_that_the_training_program_takes():
    from tests.support.embedded import settings

    made = {name: settings(*flags) for name, flags in ARMS.items()}
    assert len({str(vars(config)) for config in made.values()}) == len(made)
    unscaled = (PLAIN, "counterfactual, as the paper", "80/20", "prefix_tree", "entropy shaping")
    weighed = [config for name, config in made.items() if name not in unscaled]
    assert {config.counterfactual().normalize for config in weighed} == {"mean"}
