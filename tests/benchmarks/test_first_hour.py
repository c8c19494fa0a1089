"""The first hour's script: every command is one that runs, selects something and ends within nine minutes."""

import os
import re
import shlex
import subprocess

import pytest
import torch

from benchmarks import first_hour
from benchmarks.harness import parts
from benchmarks.harness.environment import REPOSITORY
from benchmarks.speed import command

pytestmark = pytest.mark.slow

SCRIPT = REPOSITORY / "benchmarks" / "first_hour.sh"


def dry_run(*steps: str, **variables: str) -> list[list[str]]:
    environment = {**os.environ, "DRY": "1", "PY": "python3", **variables}
    ended = subprocess.run(["bash", str(SCRIPT), *steps], env=environment, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in ended.stdout.splitlines()]


def benchmark_options() -> list[list[str]]:
    lines = dry_run(COMMIT="abc", R="results.json")
    return [line[line.index("benchmarks") + 1 :] for line in lines if "benchmarks" in line]


def test_the_script_is_a_script():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert os.access(SCRIPT, os.X_OK)


def test_every_command_ends_within_nine_minutes_and_its_part_before_that():
    for line in dry_run():
        assert line[0] == "timeout"
        limit = int(next(word for word in line if word.isdigit()))
        kill = sum(int(n) for n in re.findall(r"--kill-after=(\d+)", " ".join(line)))
        assert limit + kill < 540
    for arguments in benchmark_options():
        assert command.parse_options(arguments).limit + parts.GRACE_SECONDS < 510


def test_steps_run_one_by_one_with_what_the_caller_names():
    (before, work, after) = dry_run("6", PY="/some/python", R="r.json", COMMIT="abc", DEVICE="cpu")
    assert before[-2:] == ["benchmarks.first_hour", "6"]
    assert after[-3:] == ["benchmarks.first_hour", "6", "r.json"]
    options = command.parse_options(work[work.index("benchmarks") + 1 :])
    assert (str(options.into), options.commit, options.device, options.only) == ("r.json", "abc", "cpu", ["profile"])
    wrong = subprocess.run(["bash", str(SCRIPT), "12"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.strip()) == (2, "steps are 1 to 9, got 12")


class Collected:
    """How many tests a pytest run would run."""

    count = 0

    def pytest_collection_finish(self, session):
        self.count = len(session.items)


@pytest.mark.parametrize("arguments", [a for a in benchmark_options() if "tests" not in a], ids=" ".join)
def test_what_is_selected_exists(arguments, tmp_path, capsys):
    options, collected = command.parse_options(arguments), Collected()
    (name,) = options.only
    line = parts._command(
        parts.PARTS[name], torch.device("cuda"), options, None, tmp_path / "figures", tmp_path / "tests"
    )
    assert pytest.main([*line[3:], "--collect-only", "-q"], plugins=[collected]) == 0
    assert collected.count > 0


def test_files_of_tests_exist():
    chosen = [command.parse_options(arguments) for arguments in benchmark_options() if "tests" in arguments]
    assert len(chosen) == 2
    assert all((REPOSITORY / path).exists() for options in chosen for path in options.tests)


# What was predicted and what was found

MIXED = first_hour.MIXED


def figure(group, name="ours", median=0.01, **facts):
    return {"group": group, "name": name, "seconds": {"median": median}, "tflop_per_s": 250.0, **facts}


DOCUMENT = {
    "state": {"kernels": "whole", "step": "cut"},
    "parts": {
        "first-light": {
            "checks": [{"group": "log-probs", "error_over_budget": 0.5}, {"group": "attention", "wrong": "off"}],
            "builds": [
                {"name": "tree_attention_kernel", "registers": 128, "spilled_words": 0},
                {"name": "key_gradient_kernel", "registers": 255, "spilled_words": 10},
            ],
        },
        "tests": {"outcome": "failed", "tests": {"tests": 9, "failures": 1, "errors": 1}},
        "kernels": {
            "figures": [figure("attention Qwen3-1.7B gsm8k"), figure("attention backward Qwen3-1.7B gsm8k")],
            "ratios": [
                {"group": "log-probs Qwen3-1.7B and Qwen2.5-3B, 16 rows", "of": "bound", "to": "ours", "ratio": 0.9}
            ],
        },
        "step": {
            "figures": [
                figure(
                    f"step, {MIXED}", first_hour.EXACT, update_seconds=0.3, credit_seconds=0.2,
                    rows_with_gradient=10_000.0, rows_without_gradient=40_000.0,
                )
            ],
            "ratios": [{"group": f"step, {MIXED}", "of": first_hour.EXACT, "to": "TRL", "ratio": 0.5}],
        },
        "profile": {
            "profiles": [
                {
                    "group": f"profile, {MIXED}", "name": first_hour.EXACT, "idle_share": 0.25, "busy_seconds": 0.3,
                    "classes": [{"name": "attention", "share": 0.1}],
                }
            ]
        },
        "loss": {
            "figures": [figure(f"loss from hidden states, {first_hour.HEAD} frozen")],
            "ratios": [
                {"group": f"loss from hidden states, {first_hour.HEAD} frozen", "of": of, "to": "ours", "ratio": ratio}
                for of, ratio in (("eager", 3.0), ("Liger chunked", 2.5), ("ours, half", 0.5), ("bare GEMMs", 0.9))
            ],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (1, ["1 of 2 wrong: attention", "1 of 2 builds: key_gradient_kernel 10", "128 to 128 in 1 builds"]),
        (2, ["2 of 9 red in all so far (failed)"]),
        (4, ["250 TFLOP/s", "10 ms", "0.9"]),
        (5, ["30 ms (10000 rows in 300 ms)", "5 ms (40000 rows in 200 ms)", "0.5", "10 ms"]),
        (6, ["25%", "10% of 300 ms"]),
        (7, ["10 ms", "2.50 (Liger chunked)"]),
        (9, ["nothing yet"]),
    ],
)
def test_what_was_found_stands_beside_what_was_predicted(step, found):
    table = first_hour.table(step, DOCUMENT)
    for line in first_hour.STEPS[step]:
        assert line.predicted in table
    for text in found:
        assert text in table


def test_without_a_result_file_only_predictions_are_told(capsys, tmp_path):
    for step in first_hour.STEPS:
        assert first_hour.main([str(step)]) == 0
    assert "found" not in capsys.readouterr().out
    assert first_hour.main(["1", str(tmp_path / "none.json")]) == 0
    assert "nothing yet" in capsys.readouterr().out


def test_what_is_looked_up_is_what_the_benchmarks_record():
    """Groups of the predictions are groups that a GPU's workloads have."""
    from benchmarks.speed import bench_attention_backward, bench_kernels, bench_loss, bench_scoring, bench_step

    groups = {f"attention {name}" for name in bench_kernels.ATTENTION["cuda"]}
    groups |= {f"attention backward {name}" for name in bench_attention_backward.BACKWARD["cuda"]}
    groups |= {f"log-probs {name}" for name in bench_kernels.LOGPROB["cuda"]}
    groups |= {f"step, {name}" for name in bench_step.WORKLOADS["cuda"]}
    groups |= {f"profile, {name}" for name in bench_step.WORKLOADS["cuda"]}
    groups |= {f"loss from hidden states, {name}" for name in bench_loss.LINEAR["cuda"]}
    groups |= {f"loss from logits, {name}" for name in bench_loss.LOGITS["cuda"]}
    groups |= {f"scoring {name}" for name in bench_scoring.WORKLOADS["cuda"]}
    asked = set()

    class Asked(dict):
        def get(self, key, default=None):
            return self if key == "tests" else [Entry()]

        def __contains__(self, key):
            return True

    class Entry(dict):
        def get(self, key, default=None):
            return Any(key)

    class Any:
        def __init__(self, key):
            self.key = key

        def __eq__(self, other):
            if self.key == "group":
                asked.add(other)
            return False

        __hash__ = None

    document = {"parts": {name: Asked() for name in parts.PARTS if name not in ("tests", "first-light")}}
    for lines in first_hour.STEPS.values():
        for line in lines:
            line.find(document)
    assert asked
    assert asked <= groups
