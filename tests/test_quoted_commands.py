"""Every command of the training program and of the benchmarks that a page or the Makefile quotes is one that parses."""

import argparse
import functools
import importlib
import re
import shlex

import pytest
import tyro

from benchmarks.research import command as evidence
from tests.conftest import REPOSITORY
from trainer.__main__ import main
from trainer.config import TrainConfig
from trainer.settings import TrainSettings

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
STARTS = re.compile(
    r"(?:python3?|\$\(PY\)|torchrun .*?|accelerate launch .*?) -m ((?:benchmarks|trainer|cfa_trainer)\b[\w.]*)(.*)"
    r"|^(?:[A-Z_]+=\S+ )*(cfa-(?:train|analyze|compare))( .+)"
)
PROGRAMS = {
    "cfa-train": "trainer", "cfa_trainer": "trainer", "cfa-analyze": "trainer.analyze",
    "cfa-compare": "trainer.analyze compare",
}  # fmt: skip
MAINS = {
    "benchmarks": "benchmarks.__main__", "trainer": "trainer.cli", "trainer.analyze": "trainer.analyze.__main__",
}  # fmt: skip


def quoted() -> list[str]:
    """The commands, each once; a placeholder in capitals is left as it is, unless the program has to know the word."""
    result = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        result += [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        result += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    result += (REPOSITORY / "Makefile").read_text().splitlines()
    found = [match.groups() for line in result if (match := STARTS.search(line))]
    parts = [(module or program, options or rest or "") for module, options, program, rest in found]
    commands = [PROGRAMS.get(name, name) + rest for name, rest in parts]
    return sorted({re.sub(r"evidence(?: NAME)?$", "evidence alignment", command) for command in commands})


class ParsedError(Exception):
    """Raised where the program would begin."""


def raising(parse):
    def parsed(*args, **kwargs):
        result = parse(*args, **kwargs)
        if isinstance(result, TrainSettings):
            TrainConfig(**vars(result))
        if not getattr(args[0], "prog", "").endswith("-m benchmarks"):  # which passes on to its commands
            raise ParsedError(result)
        return result

    return parsed


def parsed_only(function):
    """A command that ends where it would begin, with the options of `function`."""

    @functools.wraps(function)
    def parsed(*args, **kwargs):
        raise ParsedError(args, kwargs)

    return parsed


@pytest.mark.parametrize("command", quoted())
def test_a_quoted_command_parses(command, monkeypatch):
    name, *arguments = shlex.split(command, comments=True)
    module = importlib.import_module(MAINS[name])
    if name == "trainer":
        monkeypatch.setattr(module, "parse", raising(module.parse))
    else:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", raising(argparse.ArgumentParser.parse_args))
        monkeypatch.setattr(tyro, "cli", raising(tyro.cli))
        made = evidence.commands
        monkeypatch.setattr(evidence, "commands", lambda line: {name: parsed_only(f) for name, f in made(line).items()})
    with pytest.raises(ParsedError):
        (main if name == "trainer" else module.main)(arguments)
