"""`python -m benchmarks evidence NAME`: gather evidence on what credit finds and buys, with tables beside the results.

Results are kept in the folder, piece by piece, and an interrupted run resumes from them. `tables` writes the tables
again from the results that are there.
"""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import tyro
from tyro.extras import subcommand_cli_from_dict

from benchmarks.harness.results import RESULTS, Pieces, document_head, write
from benchmarks.research import alignment, arms

PROGRAM = "python -m benchmarks evidence"


@dataclass(frozen=True)
class Place:
    """Where a command keeps its pieces and writes its results."""

    folder: Path | None = None
    """Folder of the pieces; by default runs/ and the command's name."""
    results: Path = RESULTS
    """Folder of the tables."""
    commit: str | None = None
    """What to record where git cannot tell."""

    def below(self, name: str) -> Path:
        """Return the folder of a command's pieces."""
        return self.folder or Path("runs") / name


class Measure(NamedTuple):
    """A measurement that keeps pieces: settings, how it is run and written down, names that can be chosen.

    `extent`: settings that say how many pieces there are, and not what a piece is, so that a longer run resumes from a
    shorter one.
    """

    settings: type
    run: Callable[..., dict[str, Any]]
    markdown: Callable[[Any], str]
    text: str
    names: Sequence[str] = ()
    extent: Sequence[str] = ()


OWN = alignment.AlignmentSettings(
    examples=4, max_tokens=256, dtype="bfloat16", parameters="few", truth_groups=512, batch=16, blocks=4, moments=0
)
"""What `own` measures: the direction, at a size that two minutes of a GPU pay for."""

MEASURES = {
    "alignment": Measure(
        alignment.AlignmentSettings, alignment.run, alignment.markdown,
        "Measure how well a small batch's step points at the true gradient, by kind of credit.",
        ["module:name", *arms.SETS, *arms.ARMS], ("blocks",),
    ),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run a command; wrong input gives one line on stderr and exit code 1, a wrong option exit code 2."""
    arguments = sys.argv[1:] if argv is None else argv
    torch.set_num_threads(1)
    try:
        paths = subcommand_cli_from_dict(
            commands([*PROGRAM.split(), *arguments]), prog=PROGRAM, description=__doc__, args=arguments,
            config=(tyro.conf.OmitArgPrefixes,),
        )  # fmt: skip
    except (ValueError, OSError, FloatingPointError, RuntimeError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    for path in paths:
        print(f"== {path}", flush=True)
    return 0


def commands(line: Sequence[str]) -> dict[str, Callable[..., list[Path]]]:
    """Make the commands, each of which returns the paths that it wrote; `line` is what a result names as its own."""

    def run_own(place: Place, settings: alignment.AlignmentSettings = OWN) -> list[Path]:
        """Say whether credit would help a model of your own on your own problems: name both."""
        if not (settings.model and settings.problems):
            raise ValueError("own: --model and --problems must be given; `alignment` has defaults for both")
        folder, chosen = place.below("own"), [alignment.CREDIT, "right times 4"]
        return _written(MEASURES["alignment"], "own", settings, replace(place, folder=folder, results=folder), chosen)

    def write_tables(place: Place) -> list[Path]:
        """Write tables again from the results that are there."""
        return tables(place.results)

    def measured(command: str, measure: Measure) -> Callable[..., list[Path]]:
        def run(settings: Any, place: Place, name: str = f"evidence-{command}", arms: Any = ()) -> list[Path]:
            return _written(measure, name, settings, replace(place, folder=place.below(command)), arms)

        some = tyro.conf.arg(metavar="NAME ...", help=f"Names among {'; '.join(measure.names)}.")
        run.__annotations__ |= {
            "settings": measure.settings, "name": Annotated[str, tyro.conf.arg(help="Name of the result files.")],
            "arms": Annotated[tuple[str, ...], some if measure.names else tyro.conf.Suppress],
        }  # fmt: skip
        run.__doc__ = measure.text
        return run

    def _written(measure: Measure, name: str, settings: Any, place: Place, names: Sequence[str]) -> list[Path]:
        chosen = {"arms": [*names] or None} if measure.names else {}
        known = {key: value for key, value in (asdict(settings) | chosen).items() if key not in measure.extent}
        assert place.folder is not None
        head = document_head(line, place.commit)
        document = head | measure.run(Pieces(place.folder / "pieces", known, head), place.folder, settings, **chosen)
        return write(document, measure.markdown(document), place.results, name)

    own = {"own": run_own, "tables": write_tables}
    return {name: measured(name, measure) for name, measure in MEASURES.items()} | own


def tables(folder: Path) -> list[Path]:
    """Write each result's table again, as the command in its document would."""
    paths = list[Path]()
    for path in sorted(folder.glob("evidence-*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        command = shlex.split(document.get("command", ""))[4:5]
        if command and command[0] in MEASURES:
            try:
                path.with_suffix(".md").write_text(MEASURES[command[0]].markdown(document), encoding="utf-8")
                paths.append(path.with_suffix(".md"))
            except (KeyError, TypeError):  # figures that an earlier commit wrote down in another form
                print(f"{path}: was made by another form of the command; its table is left as it is", file=sys.stderr)
    return paths
