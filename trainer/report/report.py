"""Show a run's progress; write `metrics.jsonl`, `completions.jsonl`, `report.html`, `summary.json`.

A terminal shows a bar and ten lines of steps. A log file gets a line when something long begins and one for each step.
The first process reports for all. Further logging back-ends are imported only on request.
"""

import contextlib
import importlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from transformers import PreTrainedTokenizerBase

from cfa_kernels.credit.weights import unit_weight
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.text.offsets import decoded

from ..config import TrainConfig
from ..disk import naming, write_whole
from ..evaluate import Evaluation, paired_gain
from ..extras import program
from ..provenance import made_by
from ..state import Step
from .page import write_run_page

_ROWS_SHOWN = 10
_TEXTS = {"question": "question", "reference": "answer"}  # columns of the data, by their names in a record
Log = Callable[[dict[str, float], int], object]


class Report:
    """Console and run folder of one run; a context manager, so that files are whole even after an error."""

    def __init__(
        self, folder: Path, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, state: Mapping[str, Any]
    ) -> None:
        self.console = Console(highlight=False)
        self._is_log = not self.console.is_terminal
        self._folder, self._config, self._tokenizer = folder, config, tokenizer
        self._title = f"{config.loss_type.upper()}, credit: {config.credit_name}, seed {config.seed}"
        # A tracker knows a resumed run by its id.
        fresh = {"id": uuid.uuid4().hex, "bytes": {}, "evaluations": [], "tokens": 0, "seconds": 0.0}
        self._state: dict[str, Any] = {**fresh, **state}
        self._started = time.perf_counter() - self._state["seconds"]
        self._has_stepped = False
        self._explained = set[str]()

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
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        columns += [TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn()]
        self._progress = self._stack.enter_context(
            # Steps may take minutes.
            Progress(*columns, console=self.console, speed_estimate_period=math.inf, disable=self._is_log)
        )
        steps = self._config.max_steps
        self._bar = self._progress.add_task("training", total=steps, completed=last or 0, note="", visible=False)
        return self

    def _open(self, name: str) -> TextIO:
        with naming(self._folder / name):
            file = self._stack.enter_context((self._folder / name).open("a", encoding="utf-8"))
            file.truncate(self._state["bytes"].get(name, 0))  # drops the lines after the checkpoint
        return file

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._progress.update(self._bar, visible=False)
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
                self._warn(f"{page} was not written: {problem}")

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def _warn(self, problem: str) -> None:
        self._print(f"[bold yellow]warning[/bold yellow]: {escape(problem)}")

    def opening(self, policy: nn.Module, train_problems: int, held_out: int, notes: Sequence[str] = ()) -> None:
        """Print the settings of the run; `notes` are settings that do not hold here, and why."""
        config, weights = self._config, list(policy.parameters())
        total, trained = (sum(p.numel() for p in weights if p.requires_grad or every) for every in (True, False))
        self._print(
            f"[bold]{self._title}[/bold]\n"
            f"  model    {escape(config.model)} ({trained:,} of {total:,} parameters train, "
            f"{str(weights[0].dtype)[6:]}, {weights[0].device})\n"
            f"  data     {escape(config.dataset)}: {train_problems:,} problems to train on, {held_out:,} held out\n"
            f"  step     {config.generation_batch_size // config.num_generations} problems x "
            f"{config.num_generations} completions, temperature {config.temperature}, top-p {config.top_p}, "
            f"{config.max_steps} steps\n"
            f"  results  {escape(str(self._folder))}\n"
        )
        for note in notes:
            self._print(f"  note     {escape(note)}\n")

    @contextlib.contextmanager
    def evaluating(self, step: int, problems: int) -> Iterator[Callable[[int], None]]:
        """Show a bar for an evaluation, or a line in a log file; yields the function that advances it."""
        self._begins(step, f"evaluating, {problems:,} completions of held-out problems")
        task = self._progress.add_task(f"held-out, step {step}", total=problems, note="")
        try:
            yield lambda n: self._progress.advance(task, n)
        finally:
            self._progress.remove_task(task)

    def sampling(self, step: int) -> None:
        """Tell a log file that a step begins, the first of this process."""
        if not self._has_stepped:
            self._begins(step, f"sampling {self._config.generation_batch_size:,} completions")

    def _begins(self, step: int, what: str) -> None:
        if self._is_log:
            self._print(f"  step {step:>4}   {what} ...")

    def evaluated(self, step: int, result: Evaluation) -> None:
        """Record held-out accuracy after `step` steps."""
        self._state["evaluations"].append((step, asdict(result)))
        figures = result.metrics
        self._record(step, figures)
        sampled = "".join(f", pass@{k} {share:.1%}" for k, share in result.pass_at.items())
        self._print(
            f"  step {step:>4}   [bold]held-out accuracy {result.accuracy:6.1%}[/bold]  "
            f"({sum(result.correct)} of {len(result.correct)}, 95 % interval {figures['eval_accuracy_low']:.1%} to "
            f"{figures['eval_accuracy_high']:.1%}, greedy{sampled})"
        )
        self._write_page()

    def stepped(self, step: int, result: Step) -> None:
        """Record a training step: files, bar, and a line: in a log file always, else every tenth part of the run."""
        self._has_stepped, metrics = True, result.metrics
        self._state["tokens"] += result.batch.rollouts.tokens()
        self._record(step, metrics | {"num_tokens": self._state["tokens"]})
        logged = logged_rows([bool(spans) for spans in result.credit.spans], self._config.log_completions)
        records = (completion_record(result, b, self._tokenizer, self._config) for b in logged)
        entries = [{"step": step, **one, **result.notes.get(b, {})} for b, one in zip(logged, records, strict=True)]
        self._write(self._completions_file, entries)
        share = f"credit {metrics['time/credit'] / metrics['step_time']:.0%}"
        note, what = f"reward {metrics['reward']:.2f}  {share} of the time", ""
        if result.nothing is not None:
            what = f"   {result.nothing.what}"
            if result.nothing.what not in self._explained:
                self._explained.add(result.nothing.what)
                self._warn(f"step {step}: {result.nothing.sentence}")
        self._progress.update(self._bar, advance=1, visible=True, note=note)
        if step % self._config.page_steps == 0:
            self._write_page()
        if self._is_log or step % math.ceil(self._config.max_steps / _ROWS_SHOWN) == 0:
            spans = metrics.get("credit/spans_mean", 0.0)
            seconds = self._progress.tasks[0].time_remaining  # None after the first step, 0 after the last
            left = f"{timedelta(seconds=round(seconds))} left" if seconds else ""
            self._print(
                f"  step {step:>4}   reward {metrics['reward']:.2f}   "
                f"mixed groups {1 - metrics['frac_reward_zero_std']:4.0%}   "
                f"spans {spans:.1f}   {metrics['step_time']:4.1f} s, {share}{what}   {left}"
            )

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        self._write(self._metrics_file, [{"step": step, **metrics}])
        for name, log in [*self._trackers.items()]:
            self._track(name, log, metrics, step)

    def _track(self, name: str, log: Callable[..., object], *arguments: object) -> None:
        try:
            log(*arguments)
        except Exception as problem:  # each has its own errors; the run's files hold all of it
            self._warn(f"report_to: {name} failed and gets no more: {type(problem).__name__}: {problem}")
            self._trackers.pop(name, None)

    def _write(self, file: TextIO, entries: Sequence[Mapping[str, Any]]) -> None:
        with naming(Path(file.name)):
            file.writelines(json.dumps(entry) + "\n" for entry in entries)
            file.flush()

    def ended(self, why: str) -> None:
        """Say why the run ends before its last step, and how to resume."""
        self._write_page()
        self._print(escape(why))

    def closing(self) -> None:
        """Print by how much held-out accuracy moved, and where all files are."""
        before, *_, after = (Evaluation(**result) for _, result in self._state["evaluations"])
        seconds = time.perf_counter() - self._started
        gain, low, high = paired_gain(before, after)
        summary = {
            "made_by": made_by(),
            "accuracy_before": before.accuracy,
            "accuracy_after": after.accuracy,
            "gain": gain,
            "gain_interval": [low, high],
            "held_out_problems": len(after.correct),
            "steps": self._config.max_steps,
            "seconds": round(seconds, 1),
        }
        self._write_page()  # before summary.json: once it exists the run counts as finished and is not resumed
        write_whole(self._folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        self._print(
            f"\n[bold]Held-out accuracy {before.accuracy:.1%} -> {after.accuracy:.1%}, "
            f"{100 * gain:+.1f} points[/bold] (95 % interval {100 * low:+.1f} to {100 * high:+.1f}; "
            f"{len(after.correct)} problems, greedy decoding; {seconds:.0f} s)\n\n"
            f"  open {escape(str(self._folder / 'report.html'))}"
        )
        for module, other in (("trainer.analyze", ""), ("trainer.analyze compare", " OTHER_RUN")):
            self._print(f"  {program(module)} {escape(str(self._folder))}{other}")


def logged_rows(has_spans: Sequence[bool], count: int) -> list[int]:
    """Choose completions to log: half are the first with spans, which show credit, others at equal distances, as is.

    Often only right ones have spans; the others are right as often as the batch is.
    """
    first = [b for b, has in enumerate(has_spans) if has][: -(-count // 2)]
    others = [b for b in range(len(has_spans)) if b not in first]
    places = min(count - len(first), len(others))
    return first + [others[i * len(others) // places] for i in range(places)]


def completion_record(result: Step, b: int, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> dict[str, Any]:
    """Record completion `b` of a step, with the unit of its spans' drops."""
    batch, credit, estimator = result.batch, result.credit, config.counterfactual().estimator
    row, ids, answer = batch.rows[b], batch.rollouts.ids()[b], credit.answers[b]
    unit = f"importance by {estimator.name}"
    if isinstance(estimator, Masking) and estimator.outcome in ("logprob", "mean_logprob"):
        unit = "nats"
    spans = []
    for span, drop in zip(credit.spans[b], credit.drop[b].tolist()):  # noqa: B905  # no drops where weights are drawn
        text, weight = decoded(ids[span.start : span.end], tokenizer), unit_weight(credit.weights[b], span)
        drop = round(drop, 4) + 0.0 if isinstance(estimator, Masking) else drop  # + 0.0: no -0.0
        spans.append({"start": span.start, "end": span.end, "text": text, "drop": drop, "weight": weight})
    counted = not (batch.rollouts.truncated[b] and config.mask_truncated_completions)
    record: dict[str, Any] = {
        "problem": batch.keys[b][-2],
        "completion": batch.rollouts.texts[b],
        "reward": None if batch.rewards[b].isnan() else batch.rewards[b].item(),
        "advantage": result.advantages[b].item(),
        "truncated": bool(batch.rollouts.truncated[b]),
        "counted": counted,
        "uncredited": _why_uncredited(result, b, config, counted=counted),
        "tokens": [decoded([i], tokenizer) for i in ids],
        **{name: str(row[column]) for name, column in _TEXTS.items() if column in row},
        "drops_unit": unit,
        "answer": None if answer is None else {"start": answer.start, "end": answer.end},
        "spans": spans,
        "credit": config.credit_name,
        "weights": _rounded(credit.weights[b].tolist()),
    }
    if credit.advantages is not None:
        record["estimators"] = {estimator.name: {"advantages": _rounded(credit.advantages[b].tolist())}}
    return record


def _why_uncredited(result: Step, b: int, config: TrainConfig, *, counted: bool) -> str | None:
    """Say why all tokens of a completion have weight 1; None if some have not."""
    credit, advantage = result.credit, result.advantages[b].item()
    shades = credit.weights[b] if credit.advantages is None else credit.advantages[b] - advantage + 1
    reasons = {
        "it was cut off at the length limit, and the loss omits it": not counted,
        "no reward function gave it a reward": bool(result.batch.rewards[b].isnan()),
        "it has no advantage: all completions of its group have one reward": advantage == 0,
        "credit is off, and every token has the same weight": config.credit_name == "none",
        "it is wrong, and completions=positive gives credit to completions with a positive advantage": (
            config.counterfactual().completions == "positive" and advantage < 0
        ),
        "no answer was found in it": credit.answers[b] is None and not credit.spans[b],
        "no span was found before its answer": not credit.spans[b],
        "its spans do not differ in importance": True,
    }
    is_uniform = bool((shades == 1).all())
    return next(reason for reason, holds in reasons.items() if holds) if is_uniform else None


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


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
    """Start back-end `name` for a run; returns `log(metrics, step)` and `close()`.

    `run` is the run's own id, `step` the last one that it recorded, from which it continues; None for a new run.
    Raises `ImportError` that says what to install, `ConnectionError` if the back-end does not start.
    """
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
