"""Show a run's progress; write `metrics.jsonl`, `completions.jsonl`, `report.html`, `summary.json`.

A terminal shows a bar and ten lines of steps. A log file gets a line when something long begins and one for each step.
The first process reports for all. Further logging back-ends are imported only on request.
"""

import contextlib
import importlib
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from cfa_kernels.credit.presets import NONE
from cfa_kernels.credit.weights import unit_weight
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.text.offsets import decoded

from ..config import TrainConfig
from ..disk import naming, write_whole
from ..evaluate import Evaluation, least_gain, paired_gain
from ..extras import program
from ..provenance import made_by
from ..state import Step
from .page import write_run_page

_ROWS_SHOWN = 10
_MANY_CUT = 0.5  # share of completions beyond which a warning names the setting
_TEXTS = {"question": "question", "reference": "answer"}  # columns of the data, by their names in a record
_STAGES = {"sampling": "time/generate", "credit": "time/credit", "update": "time/update"}
Log = Callable[[dict[str, float], int], object]


class Report:
    """Lines and run folder of one run; a context manager, so that files are whole even after an error."""

    def __init__(
        self, folder: Path, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, state: Mapping[str, Any]
    ) -> None:
        self._folder, self._config, self._tokenizer = folder, config, tokenizer
        self._title = f"{config.loss_type.upper()}, credit: {config.credit_name}, seed {config.seed}"
        # A tracker knows a resumed run by its id.
        fresh = {"id": uuid.uuid4().hex, "bytes": {}, "evaluations": [], "tokens": 0, "seconds": 0.0}
        self._state: dict[str, Any] = {**fresh, **state}
        self._started = time.perf_counter() - self._state["seconds"]
        self._is_log, self._warned, self._times = not sys.stdout.isatty(), set[str](), list[float]()

    def state(self) -> dict[str, Any]:
        """Sync the files to the disk, and return as JSON what a report needs to continue from here."""
        sizes = {}
        for file in (self._metrics_file, self._completions_file):
            with naming(path := Path(file.name)):
                file.flush()
                os.fsync(file.fileno())
            sizes[path.name] = path.stat().st_size
        return {**self._state, "bytes": sizes, "seconds": time.perf_counter() - self._started}

    def __enter__(self) -> "Report":
        self._stack = contextlib.ExitStack()
        self._metrics_file, self._completions_file = map(self._open, ("metrics.jsonl", "completions.jsonl"))
        lines = (self._folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = int(json.loads(lines[-1])["step"]) if lines else None
        self._trackers: dict[str, Log] = {}
        for name in self._config.report_to:
            log, close = open_tracker(name, self._folder, asdict(self._config), self._state["id"], last)
            self._trackers[name] = log
            self._stack.callback(self._track, name, close)
        self._bar = self._stack.enter_context(self._shown("training", self._config.max_steps, last or 0))
        return self

    def _open(self, name: str) -> TextIO:
        with naming(self._folder / name):
            file = self._stack.enter_context((self._folder / name).open("a", encoding="utf-8"))
            file.truncate(self._state["bytes"].get(name, 0))  # drops the lines after the checkpoint
        return file

    def _shown(self, name: str, total: int, done: int = 0) -> Any:
        return tqdm(desc=name, total=total, initial=done, disable=self._is_log, leave=False, smoothing=0)

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*[OSError, ValueError] if failed else []):  # a full disk is known by then
            self._stack.close()
            if failed:
                self._write_page()

    def _write_page(self) -> None:
        page = self._folder / "report.html"
        if (self._folder / "metrics.jsonl").stat().st_size:
            try:
                write_run_page(page, self._folder, self._title)
            except (ValueError, OSError) as problem:  # the page only shows what other files hold
                self._warn("page", f"{page} was not written: {problem}")

    def _print(self, text: str) -> None:
        with tqdm.external_write_mode():
            print(text, flush=True)

    def _warn(self, kind: str, problem: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._print(f"warning: {problem}")

    def opening(self, policy: nn.Module, train_problems: int, held_out: int, notes: Sequence[str] = ()) -> None:
        """Print the settings of the run; `notes` are settings that do not hold here, and why."""
        config, weights = self._config, list(policy.parameters())
        total, trained = (sum(p.numel() for p in weights if p.requires_grad or every) for every in (True, False))
        self._print(
            f"{self._title}\n"
            f"  model    {config.model} ({trained:,} of {total:,} parameters train, {str(weights[0].dtype)[6:]}, "
            f"{weights[0].device})\n"
            f"  data     {config.dataset}: {train_problems:,} problems to train on, {held_out:,} held out\n"
            f"  step     {config.generation_batch_size // config.num_generations} problems x "
            f"{config.num_generations} completions, temperature {config.temperature}, top-p {config.top_p}, "
            f"{config.max_steps} steps\n"
            f"  results  {self._folder}\n"
        )
        for note in notes:
            self._print(f"  note     {note}\n")

    @contextlib.contextmanager
    def evaluating(self, step: int, problems: int) -> Iterator[Callable[[int], object]]:
        """Show a bar for an evaluation, or a line in a log file; yields the function that advances it."""
        self._begins(step, f"evaluating, {problems:,} completions of held-out problems")
        with self._shown(f"held-out, step {step}", problems) as bar:
            yield bar.update

    def sampling(self, step: int) -> None:
        """Tell a log file that a step begins, the first of this process."""
        if not self._times:
            self._begins(step, f"sampling {self._config.generation_batch_size:,} completions")

    def _begins(self, step: int, what: str) -> None:
        if self._is_log:
            self._print(f"  step {step:>4}   {what} ...")

    def evaluated(self, step: int, result: Evaluation) -> None:
        """Record held-out accuracy after `step` steps."""
        self._state["evaluations"].append((step, asdict(result)))
        figures, count = result.metrics, len(result.correct)
        self._record(step, figures)
        sampled = "".join(f", pass@{k} {share:.1%}" for k, share in result.pass_at.items())
        self._print(
            f"  step {step:>4}   held-out accuracy {result.accuracy:6.1%}  ({sum(result.correct)} of {count}, 95 % "
            f"interval {figures['eval_accuracy_low']:.1%} to {figures['eval_accuracy_high']:.1%}, greedy{sampled}; "
            f"{count} problems: gains above {100 * least_gain(count):.0f} points)"
        )
        self._write_page()

    def stepped(self, step: int, result: Step) -> None:
        """Record a training step: files, bar, and a line: in a log file always, else every tenth part of the run."""
        metrics, rollouts, config = result.metrics, result.batch.rollouts, self._config
        self._state["tokens"] += rollouts.tokens()
        self._record(step, metrics | {"num_tokens": self._state["tokens"]})
        logged = logged_rows([bool(spans) for spans in result.credit.spans], config.log_completions)
        records = (completion_record(result, b, self._tokenizer, config) for b in logged)
        entries = [{"step": step, **one, **result.notes.get(b, {})} for b, one in zip(logged, records, strict=True)]
        self._write(self._completions_file, entries)
        if (cut := metrics["completions/clipped_ratio"]) > _MANY_CUT:
            at = f"--max_completion_length {config.max_completion_length}"
            self._warn("cut", f"step {step}: {cut:.0%} of the completions were cut off at {at}")
        if result.nothing is not None:
            self._warn(result.nothing.what, f"step {step}: {result.nothing.sentence}")
        self._times.append(metrics["step_time"])
        self._bar.update()
        if step % config.page_steps == 0:
            self._write_page()
        if self._is_log or step % math.ceil(config.max_steps / _ROWS_SHOWN) == 0:
            stages = (f"{name} {metrics[key]:.1f}" for name, key in _STAGES.items() if key in metrics)
            left = sum(self._times) / len(self._times) * (config.max_steps - step)
            parts = {
                f"reward {metrics['reward']:.2f}": True,
                f"mixed groups {1 - metrics['frac_reward_zero_std']:4.0%}": True,
                f"cut off {cut:.0%}": True,
                f"spans {metrics.get('credit/spans_mean', 0.0):.1f}": config.credit_name != NONE,
                f"{metrics['step_time']:.1f} s: {', '.join(stages)}": True,
                f"{sum(rollouts.rows.lengths) / metrics['time/generate']:,.0f} tokens/s": True,
                result.nothing.what if result.nothing else "": result.nothing is not None,
                f"{timedelta(seconds=round(left))} left": left > 0,
            }
            self._print(f"  step {step:>4}   {'   '.join(part for part, is_shown in parts.items() if is_shown)}")

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        self._write(self._metrics_file, [{"step": step, **metrics}])
        for name, log in [*self._trackers.items()]:
            self._track(name, log, metrics, step)

    def _track(self, name: str, log: Callable[..., object], *arguments: object) -> None:
        try:
            log(*arguments)
        except Exception as problem:  # each has its own errors; the run's files hold all of it
            self._print(f"warning: report_to: {name} failed and gets no more: {type(problem).__name__}: {problem}")
            self._trackers.pop(name, None)

    def _write(self, file: TextIO, entries: Sequence[Mapping[str, Any]]) -> None:
        with naming(Path(file.name)):
            # JSON has no nan and no infinity: they are null.
            finite = (json.loads(json.dumps(entry), parse_constant=lambda _: None) for entry in entries)
            file.writelines(json.dumps(entry) + "\n" for entry in finite)
            file.flush()

    def ended(self, why: str) -> None:
        """Say why the run ends before its last step, and how to resume."""
        self._write_page()
        self._print(why)

    def closing(self) -> None:
        """Print by how much held-out accuracy moved, and where all files are."""
        before, *_, after = (Evaluation(**result) for _, result in self._state["evaluations"])
        seconds = time.perf_counter() - self._started
        gain, low, high = paired_gain(before, after)
        summary = {
            "made_by": made_by(), "accuracy_before": before.accuracy, "accuracy_after": after.accuracy, "gain": gain,
            "gain_interval": [low, high], "held_out_problems": len(after.correct), "steps": self._config.max_steps,
            "seconds": round(seconds, 1),
        }  # fmt: skip
        self._write_page()  # before summary.json: once it exists the run counts as finished and is not resumed
        write_whole(self._folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        self._print(
            f"\nHeld-out accuracy {before.accuracy:.1%} -> {after.accuracy:.1%}, {100 * gain:+.1f} points (95 % "
            f"interval {100 * low:+.1f} to {100 * high:+.1f}; {len(after.correct)} problems, greedy decoding; "
            f"{seconds:.0f} s)\n\n  open {self._folder / 'report.html'}\n"
            f"  {program('trainer.analyze')} {self._folder}\n"
            f"  {program('trainer.analyze compare')} {self._folder} OTHER_RUN"
        )


def logged_rows(has_spans: Sequence[bool], count: int) -> list[int]:
    """Choose completions to log: half are the first with spans, which show credit, others at equal distances, as is.

    Often only right ones have spans; the others are right as often as the batch is.
    """
    first = [b for b, has in enumerate(has_spans) if has][: -(-count // 2)]
    others = [b for b in range(len(has_spans)) if b not in first]
    places = min(count - len(first), len(others))
    return first + [others[i * len(others) // places] for i in range(places)]


def completion_record(result: Step, b: int, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> dict[str, Any]:
    """Record completion `b` of a step, with its credit where the run assigns any."""
    batch, credit, row, ids = result.batch, result.credit, result.batch.rows[b], result.batch.rollouts.ids()[b]
    record: dict[str, Any] = {
        "problem": batch.keys[b][-2], "completion": batch.rollouts.texts[b],
        "reward": None if batch.rewards[b].isnan() else batch.rewards[b].item(),
        "advantage": result.advantages[b].item(), "truncated": bool(batch.rollouts.truncated[b]),
        "counted": not (batch.rollouts.truncated[b] and config.mask_truncated_completions),
        "tokens": [decoded([i], tokenizer) for i in ids],
        **{name: str(row[column]) for name, column in _TEXTS.items() if column in row},
    }  # fmt: skip
    if config.credit_name == NONE:
        return record
    estimator, answer, spans = config.counterfactual().estimator, credit.answers[b], []
    for span, drop in zip(credit.spans[b], credit.drop[b].tolist()):  # noqa: B905  # no drops where weights are drawn
        text, weight = decoded(ids[span.start : span.end], tokenizer), unit_weight(credit.weights[b], span)
        drop = round(drop, 4) + 0.0 if isinstance(estimator, Masking) else drop  # + 0.0: no -0.0
        spans.append({"start": span.start, "end": span.end, "text": text, "drop": drop, "weight": weight})
    in_nats = getattr(estimator, "outcome", None) in ("logprob", "mean_logprob")
    record |= {
        "drops_unit": "nats" if in_nats else f"importance by {estimator.name}", "spans": spans,
        "answer": None if answer is None else {"start": answer.start, "end": answer.end},
        "credit": config.credit_name, "weights": credit.weights[b].double().round(decimals=4).tolist(),
    }  # fmt: skip
    if credit.advantages is not None:
        advantages = credit.advantages[b].double().round(decimals=4).tolist()
        record["estimators"] = {estimator.name: {"advantages": advantages}}
    shades = credit.weights[b] if credit.advantages is None else credit.advantages[b] - record["advantage"] + 1
    reasons = {
        "it was cut off at the length limit, and the loss omits it": not record["counted"],
        "no reward function gave it a reward": record["reward"] is None,
        "it has no advantage: all completions of its group have one reward": record["advantage"] == 0,
        "it is wrong, and completions=positive gives credit to completions with a positive advantage": (
            config.counterfactual().completions == "positive" and record["advantage"] < 0
        ),
        "no answer was found in it": answer is None and not spans,
        "no span was found before its answer": not credit.spans[b],
        "its spans do not differ in importance": True,
    }
    reason = next(reason for reason, holds in reasons.items() if holds)
    return record | {"uncredited": reason if (shades == 1).all() else None}


class Silence(contextlib.AbstractContextManager[Any]):
    """Report of a process that is not the first: nothing is shown or written."""

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: contextlib.nullcontext(lambda _: None)


def tracker_library(name: str) -> Any:
    """Import the library of back-end `name`; raises `ImportError` that says what to install."""
    try:
        return importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError as problem:
        raise ImportError(f"report_to: {name} is not installed (pip install {name})") from problem


def open_tracker(
    name: str, folder: Path, settings: dict[str, Any], run: str, step: int | None
) -> tuple[Log, Callable[[], object]]:
    """Start back-end `name` for the run of id `run`, after its `step`, None for a new one; gives `log` and `close`."""
    library = tracker_library(name)
    if name == "tensorboard":
        writer = library.SummaryWriter(folder, purge_step=None if step is None else step + 1)
        return lambda metrics, at: [writer.add_scalar(key, value, at) for key, value in metrics.items()], writer.close
    resume = {"resume": "never" if step is None else "allow"} | ({"id": run} if name == "wandb" else {})
    try:
        library.init(project="cfa_kernels", name=folder.name, config=settings, **resume)
    except Exception as problem:  # each has its own errors
        raise ConnectionError(f"report_to: {name} cannot start: {type(problem).__name__}: {problem}") from problem
    return lambda metrics, at: library.log(metrics, step=at), library.finish
