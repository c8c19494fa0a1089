"""Every line says what made it, nothing of other code is mixed in silently, and a table says what it was made of."""

import json
import subprocess

import pytest

from benchmarks.harness import provenance
from benchmarks.harness.ledger import Ledger
from benchmarks.harness.provenance import counted, describe_source, document_head, made_by
from tests.support.sources import SOURCE

pytestmark = pytest.mark.slow

OTHER = SOURCE | {"commit": "def", "dirty": True, "code": "0ther"}


def never():
    raise AssertionError("this is known already")


def test_every_line_carries_its_source(tmp_path):
    path = tmp_path / "l.jsonl"
    Ledger(path, SOURCE).get(("a", 1), lambda: {"x": 1})
    (line,) = path.read_text().splitlines()
    assert json.loads(line) == {"key": ["a", 1], "source": SOURCE, "value": {"x": 1}}
    made = describe_source("python -m x")
    assert set(made) == set(SOURCE)
    assert set(made["versions"]) == {"python", "torch", "transformers", "triton"}


@pytest.mark.parametrize(
    "change", [{"code": "0ther"}, {"processor": "two"}, {"threads": 2}, {"versions": {"torch": "3"}}], ids=str
)
def test_lines_of_other_code_or_machines_are_left_aside_unless_asked_for(tmp_path, change):
    path, other = tmp_path / "l.jsonl", SOURCE | {"commit": "def"} | change
    Ledger(path, other).get(("a",), lambda: {"x": 1})
    Ledger(path, other).get(("b",), lambda: {"x": 2})
    mixed = Ledger(path, SOURCE, mixed=True)
    assert (mixed[("a",)], mixed.used, mixed.others) == ({"x": 1}, [other], 2)
    ledger = Ledger(path, SOURCE)
    assert (("a",) in ledger, ledger.others) == (False, 2)
    assert ledger.get(("a",), lambda: {"x": 3}) == {"x": 3}
    assert ledger.used == [SOURCE]
    again = Ledger(path, SOURCE, mixed=True)
    assert again.get(("a",), never) == {"x": 3}  # its own line wins, wherever it stands
    assert again.get(("b",), never) == {"x": 2}
    assert again.used == [SOURCE, other]


def test_a_commit_that_leaves_the_code_as_it_is_goes_on_with_what_is_there(tmp_path):
    Ledger(tmp_path / "l.jsonl", SOURCE | {"commit": "before"}).get(("a",), lambda: {"x": 1})
    assert Ledger(tmp_path / "l.jsonl", SOURCE).get(("a",), never) == {"x": 1}


def test_lines_without_a_source_are_of_an_unknown_tree(tmp_path):
    (tmp_path / "l.jsonl").write_text('{"key": ["a"], "value": {"x": 1}}\n')
    assert ("a",) not in Ledger(tmp_path / "l.jsonl", SOURCE)
    ledger = Ledger(tmp_path / "l.jsonl", SOURCE, mixed=True)
    assert ledger[("a",)] == {"x": 1}
    assert "at commit unknown" in made_by({"command": "c", "lines": counted(ledger.used)})


def test_the_lines_that_were_used_are_written_and_no_others(tmp_path):
    ledger = Ledger(tmp_path / "l.jsonl", SOURCE)
    for name in "abc":
        ledger.get((name,), lambda: {"x": 1})
    later = Ledger(tmp_path / "l.jsonl", SOURCE)
    later.get(("b",), never)
    later.write_used(tmp_path / "beside.jsonl")
    assert set(Ledger(tmp_path / "none.jsonl", SOURCE, also=[tmp_path / "beside.jsonl"])) == {("b",)}


def test_the_digest_follows_every_file_of_the_code_and_none_of_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    for file in ("cfa_kernels/a.py", "trainer/b.yaml", "benchmarks/c.py", "benchmarks/results/d.json", "docs/e.md"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")
    digests = [provenance.code_digest()]
    for file in ("benchmarks/results/d.json", "docs/e.md", "cfa_kernels/a.py", "trainer/b.yaml", "benchmarks/c.py"):
        (tmp_path / file).write_text("2")
        digests.append(provenance.code_digest())
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[2:])) == 4


def test_a_table_names_its_tree_or_counts_the_lines_of_each_and_marks_dirty_ones():
    environment = {"commit": "new", "dirty": False}
    assert made_by({"command": "c", "environment": environment}) == "Made by `c` at commit new"
    dirty = {"commit": "new", "dirty": True}
    assert made_by({"command": "c", "environment": dirty}) == "Made by `c` at commit new with uncommitted changes"
    # The tree of the lines counts, not that of the day on which the table was written.
    lines = counted([SOURCE, SOURCE | {"command": "another"}])
    assert made_by({"command": "c", "environment": environment, "lines": lines}) == "Made by `c` at commit abc"
    several = made_by({"command": "c", "environment": environment, "lines": counted([OTHER, SOURCE, OTHER])})
    assert "from 3 pieces of work that **several trees** did" in several
    assert several.endswith("2 at commit def with uncommitted changes, 1 at commit abc")
    machines = counted([SOURCE, SOURCE | {"processor": "two"}])
    assert "1 at commit abc on two, torch 2" in made_by({"command": "c", "environment": environment, "lines": machines})


def test_a_document_names_command_environment_and_the_sources_of_its_lines():
    head = document_head(SOURCE, [SOURCE, OTHER, SOURCE])
    assert head["command"] == "a command"
    assert [one["lines"] for one in head["lines"]] == [2, 1]
    assert head["environment"]["versions"]["torch"]


def test_the_tree_is_called_dirty_when_a_file_differs_from_its_commit():
    command = ["git", "status", "--porcelain", "--", ".", ":!benchmarks/results"]
    status = subprocess.run(command, cwd=provenance.REPOSITORY, capture_output=True, text=True, check=False)
    if status.returncode:
        pytest.skip("not a git checkout")
    assert describe_source("c")["dirty"] == bool(status.stdout)
