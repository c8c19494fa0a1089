"""`python -m benchmarks evidence demo`: the demo's run and its analysis, by one command that results can name."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.results import made_by, write
from trainer.analyze.analysis import write_analysis
from trainer.cli import parse
from trainer.config import TrainConfig
from trainer.run import set_up, train
from trainer.settings import TrainSettings


@dataclass(frozen=True)
class DemoSettings:
    """Size of the run."""

    max_steps: int = 40
    """Optimizer steps: the demo's."""
    log_completions: int = 64
    """Completions logged a step."""
    eval_problems: int = 256
    """Held-out problems that every evaluation decodes greedily: the demo's."""


def run(folder: Path, settings: DemoSettings, head: dict[str, Any], results: Path) -> list[Path]:
    """Train in `folder`/run and write its analysis as `evidence-analysis` in `results`; returns the files there."""
    done = folder / "run"
    shutil.rmtree(done, ignore_errors=True)
    flags = [f"--{name}={value}" for name, value in asdict(settings).items()]
    flags += ["--device=cpu", "--estimator=masking", f"--output_dir={done}"]
    train(set_up(TrainConfig(**vars(parse(TrainSettings, flags, prog="")))))
    lines = [json.loads(line) for line in (done / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = [{"step": one["step"], "accuracy": one["eval_accuracy"]} for one in lines if "eval_accuracy" in one]
    said = "; ".join(f"{one['accuracy']:.1%} after step {one['step']}" for one in evaluations)
    analysis = write_analysis(done)
    tables = json.loads((analysis / "analysis.json").read_text(encoding="utf-8"))
    title, _, body = (analysis / "analysis.md").read_text(encoding="utf-8").partition("\n")
    text = f"{title}\n\n{made_by(head)}. Held-out accuracy, {settings.eval_problems} problems, greedy: {said}.\n{body}"
    return write(head | {"evaluations": evaluations, "tables": tables}, text, results, "evidence-analysis")
