"""`python -m benchmarks evidence demo`: analyse the demo's run, and judge a batch of its policy by all estimators.

The training program and its own analysis, under one command that the results can name.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence.judge import NAMES, judge
from benchmarks.harness.results import made_by, write_json
from trainer.analyze.analysis import write_analysis
from trainer.cli import parse
from trainer.config import TrainConfig
from trainer.run import set_up, train


@dataclass(frozen=True)
class DemoSettings:
    """Size of the run."""

    steps: int = 40
    """Optimizer steps of the run: the demo's."""
    log_completions: int = 64
    """Completions logged a step."""
    problems: int = 8
    """Problems of the batch that estimators judge, eight completions each."""
    eval_problems: int = 256
    """Held-out problems that every evaluation decodes greedily: the demo's."""
    seed: int = 0


def run(folder: Path, settings: DemoSettings, head: dict[str, Any], results: Path) -> list[Path]:
    """Run, judge and analyse.

    Args:
        folder: where the run and the judged completions are left.
        settings: how much.
        head: the beginning of both documents.
        results: folder of `evidence-analysis` and `evidence-estimators`.

    Returns:
        The files written there.
    """
    done = folder / "run"
    shutil.rmtree(done, ignore_errors=True)
    flags = ["--device=cpu", f"--seed={settings.seed}", f"--max_steps={settings.steps}"]
    flags += [f"--eval_problems={settings.eval_problems}"]
    train(set_up(_config(*flags, f"--log_completions={settings.log_completions}", f"--output_dir={done}")))
    lines = [json.loads(line) for line in (done / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = [{"step": one["step"], "accuracy": one["eval_accuracy"]} for one in lines if "eval_accuracy" in one]
    said = "; ".join(f"{one['accuracy']:.1%} after step {one['step']}" for one in evaluations)
    note = f"Held-out accuracy, {settings.eval_problems} problems, greedy: {said}."
    written = _write(done, results / "evidence-analysis", head | {"evaluations": evaluations}, note)
    judged = folder / "judged.jsonl"
    policy = set_up(_config(*flags, f"--model={done / 'checkpoint'}"))
    samples = judge(policy, settings.problems, NAMES, flags)
    judged.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    note = (
        f"{len(samples)} completions with an advantage, of {settings.problems} problems, sampled by that run's policy."
    )
    return written + _write(judged, results / "evidence-estimators", head, note)


def _config(*flags: str) -> TrainConfig:
    return parse(TrainConfig, list(flags), prog="python -m benchmarks evidence demo", description="")


def _write(source: Path, target: Path, head: dict[str, Any], note: str) -> list[Path]:
    """The program's own analysis of a source, under the head of a result, and its page."""
    target.parent.mkdir(parents=True, exist_ok=True)
    result = write_analysis(source)
    document = head | {"tables": json.loads((result / "analysis.json").read_text(encoding="utf-8"))}
    title, _, body = (result / "analysis.md").read_text(encoding="utf-8").partition("\n")
    paths = [target.with_suffix(end) for end in (".json", ".md", ".html")]
    write_json(paths[0], document)
    paths[1].write_text(f"{title}\n\n{made_by(document)}. {note}\n{body}", encoding="utf-8")
    shutil.copyfile(result / "page.html", paths[2])
    return paths
