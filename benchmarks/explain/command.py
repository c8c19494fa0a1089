"""Explain the time of a training step: what is counted, what it takes on a GPU by a roofline, and what was measured.

Nothing runs on a device: the step's own code runs on tensors without memory. Without `--explain` steps are measured
instead: the options are those of `speed --only step`.
"""

import argparse
import re
from pathlib import Path

import torch

from benchmarks.explain.batch import Described, described, real
from benchmarks.explain.measured import find
from benchmarks.explain.rates import GPUS, Rates, measured
from benchmarks.explain.schedule import Parts, real_lengths
from benchmarks.explain.schedule import markdown as markdown_of_schedules
from benchmarks.explain.stand_ins import has_liger
from benchmarks.explain.step import Training, configuration, policy_on_meta
from benchmarks.explain.table import Explained, explain, markdown
from benchmarks.harness.ceilings import measure_ceilings
from benchmarks.harness.tables import RESULTS
from benchmarks.harness.workloads import MODELS, corpus


def main(argv: list[str]) -> int:
    """Print the table, or measure steps; returns the exit status."""
    if argv and "--explain" not in argv and not {"-h", "--help"} & set(argv):
        from benchmarks.speed import command  # pytest and its plug-ins, not needed here

        return int(command.main(["--only", "step", *argv]))
    options = parser().parse_args(argv)
    try:
        text = page(options)
        print(text)
        if options.write:
            given = argv[: argv.index("--write")] + argv[argv.index("--write") + 2 :]
            write(options.write, " ".join(["python -m benchmarks step", *given]), text)
    except ValueError as error:
        parser().error(str(error))
    return 0


def page(options: argparse.Namespace) -> str:
    """The table with what it holds for, as Markdown."""
    config = configuration(options.model)
    rates = _rates(options)
    training = Training(0 if options.full else options.rank, tuple(options.targets))
    batch = _batch(options, config.get_text_config().vocab_size)
    name = options.model if options.model in MODELS else Path(options.model).name
    try:
        if options.schedule:
            return f"{name}, {training.words}, {batch.words}; {rates.name}.\n\n{_schedules(options, training, rates)}"
        explained = explain(lambda: configuration(options.model), training, batch, rates, most=options.rows)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name} ({type(config).__name__}) does not run on tensors without memory: {error}") from error
    trains = f"LoRA r = {options.rank}" if training.rank else "all"
    table = markdown(explained, find(RESULTS, name, options.gpu, trains))
    return f"{_heading(name, training, batch, rates, explained)}\n\n{table}"


def _schedules(options: argparse.Namespace, training: Training, rates: Rates) -> str:
    """Make the table of `schedule`, for lengths that are equal and for those of the corpus, up to `--longest`.

    Raises:
        ValueError: options that it does not follow.
    """
    if options.mixed != 1 or options.lengths != "equal":
        raise ValueError("--schedule works on every group and has both lengths: leave --mixed and --lengths out")
    config = configuration(options.model)
    policy, vocabulary = policy_on_meta(config, training), config.get_text_config().vocab_size
    mean, longest = options.completion, options.longest or options.completion
    equal = [[mean] * options.group] * options.problems
    real = real_lengths(options.problems, options.group, mean, longest)

    def shape(problems: int, group: int, longest: int) -> Described:
        return described(
            problems, group, prompt=options.prompt, completion=mean, spans=options.spans, mixed=1.0, longest=longest,
            vocabulary=vocabulary,
        )  # fmt: skip

    whose = "GSM8K's" if corpus().is_real else "generated ones"
    columns = {
        "equal lengths": (equal, True),
        f"{whose}, padded": (real, True),
        f"{whose}, those that go on": (real, False),
    }
    return markdown_of_schedules(
        {name: Parts.of(policy, shape, lengths, rates, padded=padded) for name, (lengths, padded) in columns.items()}
    )


def write(file: Path, command: str, text: str) -> None:
    """Put a table in the place of the one that a page holds by the same command, between two comments.

    Raises:
        ValueError: the page has no such place.
    """
    page = file.read_text(encoding="utf-8")
    place = re.compile(rf"(<!-- {re.escape(command)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(page):
        raise ValueError(f"--write: {file} has no place for it: <!-- {command} --> and, below, <!-- end -->")
    file.write_text(place.sub(lambda found: f"{found[1]}{text}{found[2]}", page), encoding="utf-8")


def _heading(name: str, training: Training, batch: Described, rates: Rates, explained: Explained) -> str:
    fed = explained.fed
    modules = "Liger's norms, rotary embeddings and gates" if has_liger() else "the model's own norms and gates"
    return (
        f"{name}, {training.words} ({explained.trained / 1e6:,.1f} M weights), {batch.words}; {modules}.\n"
        f"Fed by the planner: a tree of {fed['tree']:,} rows in {fed['packs']} packs, {fed['branches']:,} branch rows "
        f"in {fed['branch_packs']}, {fed['loss']:,} rows to the loss.\n"
        f"{rates.name}: {rates.halves / 1e12:,.0f} TFLOP/s of bfloat16 products, {rates.float32 / 1e12:,.0f} of "
        f"float32 ones, {rates.bandwidth / 1e12:.2f} TB/s ({rates.source})."
    )


def _rates(options: argparse.Namespace) -> Rates:
    rates = GPUS[options.gpu]
    if not options.measure_rates:
        return rates
    if not torch.cuda.is_available():
        raise ValueError("--measure-rates needs a GPU; without it the rates are those of a data sheet")
    device = torch.device("cuda")
    return measured(rates, measure_ceilings(device), torch.cuda.get_device_name(device))


def _batch(options: argparse.Namespace, vocabulary: int) -> Described:
    if options.lengths == "real":
        return real(options.problems, mixed=options.mixed)
    return described(
        options.problems, options.group, prompt=options.prompt, completion=options.completion, spans=options.spans,
        mixed=options.mixed, longest=options.longest or options.completion, vocabulary=vocabulary,
    )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--explain", action="store_true", help="print the table")
    made.add_argument("--model", default="Qwen3-1.7B", help=f"{', '.join(MODELS)}, or a config.json or its folder")
    made.add_argument("--gpu", default="H200", choices=list(GPUS), help="whose rates (default: %(default)s)")
    made.add_argument("--measure-rates", action="store_true", help="of products and bytes, on the GPU at hand")
    made.add_argument("--problems", type=int, default=8, help="prompts of a step (default: %(default)s)")
    made.add_argument("--group", type=int, default=8, help="completions of each (default: %(default)s)")
    made.add_argument("--prompt", type=int, default=110, help="tokens (default: %(default)s)")
    made.add_argument("--completion", type=int, default=220, help="tokens (default: %(default)s)")
    made.add_argument("--longest", type=int, help="tokens that are decoded for the longest; default: --completion")
    made.add_argument("--spans", type=int, default=6, help="of each completion (default: %(default)s)")
    made.add_argument("--mixed", type=float, default=1.0, help="share of groups with an advantage (default: 1)")
    made.add_argument("--lengths", choices=("equal", "real"), default="equal", help="real: GSM8K, four to a problem")
    made.add_argument("--rank", type=int, default=32, help="of LoRA (default: %(default)s)")
    made.add_argument("--targets", nargs="+", default=["all-linear"], help="modules with an adapter")
    made.add_argument("--rows", type=int, help="most of a training forward; default: what half of free memory holds")
    made.add_argument("--write", type=Path, metavar="PAGE", help="also into a page, in place of its earlier table")
    made.add_argument("--schedule", action="store_true", help="instead: the step with work on groups as they end")
    made.add_argument("--full", action="store_true", help="train all weights")
    return made
