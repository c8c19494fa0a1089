"""`python -m benchmarks evidence NAME`: gather evidence on what credit finds and buys, with tables beside the results.

Results are kept in the folder, piece by piece, and an interrupted run resumes from them. `all` makes every result, one
command after the other; `tables` writes the tables and pictures again from the results that are there.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from docstring_parser import parse_from_object

from benchmarks.harness.results import RESULTS, Document, Pieces, document_head, write
from benchmarks.research import ablation, alignment, arms, demo, pictures, planted, pretrained, regimes

RUN = "--steps 40 --eval-steps 20 --eval-problems 512 --eval-samples 1"
SIZE = f"--seeds 12 {RUN}"
PAIR = '"plain DAPO" "CF where right"'
CREDIT = '"plain DAPO" "prefix gain where right, spans open"'
OPEN = f'{CREDIT} "permuted where right, spans open"'
IDLE = f'{OPEN} "CF where right" "position where right" "prefix gain where right" "random where right"'
DENSITY = (
    'plain CF "CF where right" "prefix gain where right" "permuted where right" '
    '"position where right" "CF where right, spans open" "prefix gain where right, spans open" ceiling'
)
FEW = 'plain CF "CF where right" "prefix gain where right" "position where right" "right times 4"'
RIGHT = (
    '"CF where right" "prefix gain where right" "prefix gain where right, spans open" "permuted where right" '
    '"position where right" "right times 4"'
)
ALL = (
    "planted", "demo", "ablation",
    *(
        f"ablation --regime {regime} --arms {chosen} --rates {rates} {SIZE} --name evidence-{name}"
        for name, regime, rates, chosen in (
            ("training-idle8", "idle8", '"5e-5 1e-4"', PAIR),
            ("training-plain", "plain", '"5e-5 1e-4"', PAIR),
            ("training-plain-controls", "plain", "1e-4", 'training "prefix gain where right, spans open"'),
            ("training-idle8-sampled", "idle8", "1e-4", f'{IDLE} "CF where right, spans open"'),
            ("training-free8", "free8", "1e-4", IDLE),
            ("training-decoys8", "decoys8", "1e-4", OPEN),
            ("training-decoys8-tuned", "decoys8", '"5e-5 1e-4 2e-4"', CREDIT),
            ("ablation-levels", "plain", "1e-4", '"two levels"'),
        )
    ),
    *(
        f"ablation --regime {regime} --arms {CREDIT} --rates 5e-5 --seeds 6 {RUN} --name evidence-training-{name}"
        for regime, name in (("free8", "free8-half-rate"), ("decoys8 --inner-steps 4", "decoys8-inner"))
    ),
    f"alignment --truth-groups 4096 --blocks 10 --arms {FEW}",
    *(
        f"alignment --regime {name} --truth-groups 2048 --blocks 10 --arms {chosen} --name evidence-alignment-{name}"
        for name, chosen in {"plain": "main ideas", "idle8": "main ideas"}.items()
    ),
    *(
        f"alignment --regime {name} --truth-groups 4096 --blocks {blocks} --arms {RIGHT} "
        f"--name evidence-alignment-{name}-few" for name, blocks in (("plain", 30), ("idle8", 24))
    ),
    "alignment --regime plain --truth-groups 2048 --blocks 6 --arms tokens --name evidence-alignment-tokens",
    *(
        f"alignment --regime plain --group {size} --truth-groups {groups} --blocks {blocks} --arms {FEW} "
        f"--name evidence-alignment-group{size}" for size, groups, blocks in ((4, 2048, 8), (16, 1024, 3))
    ),
    *(
        f"alignment --regime {name} --truth-groups 2048 --blocks 6 --arms {DENSITY} --name evidence-alignment-{name}"
        for name in ("idle24", "free8", "decoys8")
    ),
    'alignment --regime idle90 --truth-groups 1024 --blocks 5 --arms plain "prefix gain where right" '
    '"prefix gain where right, spans open" "prefix gain permuted where right, spans open" "position where right" '
    '"right times 4" --name evidence-alignment-idle90',
    'alignment --regime hurried8 --truth-groups 2048 --blocks 3 --arms CF '
    f'"CF where wrong" {RIGHT} --name evidence-alignment-hurried',
    *(
        f"alignment --regime idle8 {of} --truth-groups 2048 --blocks 6 --arms {FEW} --name evidence-alignment-{name}"
        for name, of in (
            ("cooler", "--temperature 0.7"),
            ("trained", '--model "{folder}/training-idle8-1/plain DAPO-seed3-1e-4/checkpoint"'),
        )
    ),
)  # fmt: skip
"""Commands that make every result, in some twenty-four hours of one core by the times of their parts."""

_KINDS: dict[type, str] = {int: "N", float: "X", str: "TEXT"}

Head = Document
"""The beginning of a document."""


class Measure(NamedTuple):
    """A measurement that keeps pieces: settings, how it is run and written down, names that can be chosen.

    `extent`: what says how many pieces there are, and not what one is, so that a longer run goes on from a shorter one.
    """

    settings: type
    run: Callable[..., dict[str, Any]]
    markdown: Callable[[Any], str]
    text: str
    names: Sequence[str] = ()
    extent: Sequence[str] = ()


OWN = (
    "alignment --name own --examples 4 --max-tokens 256 --dtype bfloat16 --parameters few --truth-groups 512 "
    '--batch 16 --blocks 4 --moments 0 --arms "prefix gain where right, spans open" "right times 4"'
)
"""What `own` measures."""

MEASURES = {
    "pretrained": Measure(
        pretrained.PretrainedSettings, pretrained.run, pretrained.markdown,
        "what a model writes to the problems of a file, what matters in it, and which estimators find that",
        extent=("judged", "costly", "credited", "scored_in"),
    ),
    "planted": Measure(
        planted.PlantedSettings, planted.run, planted.markdown, "which methods find planted truths"
    ),
    "ablation": Measure(
        ablation.AblationSettings, ablation.run, ablation.markdown,
        "the training program under every kind of credit, seed by seed", [*ablation.SETS, *ablation.ARMS],
        ("seeds", "rates", "jobs", "arms", "beside"),
    ),
    "alignment": Measure(
        alignment.AlignmentSettings, alignment.run, alignment.markdown,
        "how well a small batch's step points at the true gradient, by kind of credit",
        ["module:name", *arms.SETS, *arms.ARMS], ("blocks",),
    ),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run a command; wrong input gives one line on stderr and exit code 1."""
    arguments = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        head = document_head(["python", "-m", "benchmarks", "evidence", *arguments], options.commit)
        for path in options.run(options, head):
            print(f"== {path}", flush=True)
    except (ValueError, OSError, FloatingPointError, RuntimeError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks evidence", description=__doc__)
    commands = parser.add_subparsers(metavar="NAME", required=True)
    for name, measure in MEASURES.items():
        one = _command(commands, name, _measured, measure.text, measure.settings)
        one.set_defaults(measure=measure)
        one.add_argument("--name", default=f"evidence-{name}", help="of the result files; default: %(default)s")
        if measure.names:
            one.add_argument("--arms", nargs="+", metavar="NAME", help=f"of: {'; '.join(measure.names)}")
    _command(commands, "demo", _demo, "the demo's run and its analysis", demo.DemoSettings)
    one = _command(commands, "own", _own, "say whether credit would help a model of one's own on one's own problems")
    one.add_argument("--model", required=True, help="folder or hub name")
    one.add_argument("--problems", required=True, help="JSON lines with `question` and `answer`")
    one.add_argument("more", nargs="*", help="options of `alignment`, behind --")
    _command(commands, "model", _model, "make the regimes' model anew; one comes along")
    _command(commands, "tables", _tables, "write tables and pictures again from the results that are there")
    one = _command(commands, "all", _all, "every result; a folder for each command below the one named")
    one.add_argument("--show", action="store_true", help="print the commands and end")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace, Head], Sequence[Path]], text: str,
    settings: type | None = None,
) -> argparse.ArgumentParser:  # fmt: skip
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument("--folder", type=Path, default=Path("runs") / name, help="of its pieces; default: %(default)s")
    command.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    command.add_argument("--commit", help="what to record where git cannot tell")
    command.set_defaults(run=run)
    texts = (
        {param.arg_name: param.description or "" for param in parse_from_object(settings).params} if settings else {}
    )
    for field in fields(settings) if settings else ():
        kind, default = type(field.default), "" if field.default == "" else "; default: %(default)s"
        command.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, metavar=_KINDS[kind],
            dest=field.name, help=f"{texts[field.name].replace('%', '%%').rstrip('.')}{default}",
        )  # fmt: skip
    return command


def _filled(options: argparse.Namespace, settings: type) -> Any:
    return settings(**{field.name: getattr(options, field.name) for field in fields(settings)})


def _measured(options: argparse.Namespace, head: Head) -> list[Path]:
    measure, settings = options.measure, _filled(options, options.measure.settings)
    chosen = {"arms": options.arms} if measure.names else {}
    known = {name: value for name, value in (asdict(settings) | chosen).items() if name not in measure.extent}
    pieces = Pieces(options.folder / "pieces", known, head)
    document = head | measure.run(pieces, options.folder, settings, **chosen)
    return write(document, measure.markdown(document), options.results, options.name)


def _demo(options: argparse.Namespace, head: Head) -> list[Path]:
    return demo.run(options.folder, _filled(options, demo.DemoSettings), head, options.results)


def _own(options: argparse.Namespace, head: Head) -> list[Path]:
    """Measure the direction at a size that two minutes of a GPU pay for."""
    line = [*shlex.split(OWN), "--model", options.model, "--problems", options.problems, *options.more]
    given = _parser().parse_args([*line, "--folder", str(options.folder), "--results", str(options.folder)])
    return _measured(given, head)


def _model(options: argparse.Namespace, head: Head) -> list[Path]:
    return [regimes.train(Path("runs") / "regimes")]


def _tables(options: argparse.Namespace, head: Head) -> list[Path]:
    """Write each result's table again, as the command in its document would."""
    paths, drawn = list[Path](), list[Document]()
    for path in sorted(options.results.glob("evidence-*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        command = shlex.split(document.get("command", ""))[4:5]
        if command and command[0] in MEASURES:
            try:
                path.with_suffix(".md").write_text(MEASURES[command[0]].markdown(document), encoding="utf-8")
                paths.append(path.with_suffix(".md"))
            except (KeyError, TypeError):  # figures that an earlier commit wrote down in another form
                print(f"{path}: was made by another form of the command; its table is left as it is", file=sys.stderr)
        if command == ["alignment"] and path.stem.endswith(f"-{document['settings'].get('regime')}"):
            drawn.append(document)  # the regime's own result, not one of other arms
    return paths + pictures.draw(drawn, options.results)


def _all(options: argparse.Namespace, head: Head) -> list[Path]:
    for i, line in enumerate(one.format(folder=options.folder) for one in ALL):
        print(f"-- {i + 1} of {len(ALL)}: {line}", flush=True)
        command = shlex.split(line)
        given = _parser().parse_args(command)
        place = options.folder / getattr(given, "name", command[0])
        if command[0] == "ablation" and given.regime:  # so that a run is made once for all results that have it
            place = options.folder / f"training-{given.regime}-{given.inner_steps}"
        common = ["--folder", str(place), "--results", str(options.results)]
        common += ["--commit", options.commit] if options.commit else []
        if not options.show and main([*command, *common]):
            raise RuntimeError(f"{line}: failed; the same command again goes on there")
    return [] if options.show else _tables(options, head)
