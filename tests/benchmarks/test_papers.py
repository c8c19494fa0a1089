"""The papers' smaller tables: shares of importance and peak memory by hand, kept weights, files that go on."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from benchmarks.evidence import papers
from benchmarks.harness.results import Pieces
from cfa_kernels.rows import Rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy():
    return papers.Policy(papers.MODELS["plain"])


def test_peak_memory_counts_what_is_held_at_a_time():
    def work():
        first = torch.zeros(1000, 1000)
        second = first + 1
        del first
        third = second * 2
        return third, torch.zeros(500, 500)  # 9 MB, of 13 that were ever held

    assert papers.peak_bytes(work) == pytest.approx(9e6, rel=1e-3)


def test_shares_of_importance_are_those_of_the_spans_that_a_rule_chooses(policy, monkeypatch):
    text = "We add 2+3=5.\nThat is easy to see, I think.\nWe take 5*12=60.\n#### 60"
    row = torch.tensor(policy.tokenizer.encode(text))
    group = SimpleNamespace(rows=Rows([torch.tensor([1])], [row]))
    config = papers.CounterfactualConfig(max_spans=64)
    _, units = papers._importances(policy, group.rows, config)
    words = [policy.tokenizer.decode(row[slice(*unit)]) for unit in units[0]]
    assert [word.strip() for word in words] == ["2+3=5", "That is easy to see, I think.", "5*12=60"]
    monkeypatch.setattr(papers, "_groups", lambda *_: [("plain", policy, group)])
    monkeypatch.setattr(papers, "_importances", lambda *_: ([[5.0, 0.0, 3.0]], units))
    rows = papers.spans(papers.PapersSettings(), None)
    held = {k: {rule: rows[f"plain, k = {k}"][rule]["value"] for rule in ("best", "first", "longest", "last", "any")}
            for k in (1, 2)}  # fmt: skip
    assert held[1] == {"best": 5 / 8, "first": 5 / 8, "longest": 0, "last": 3 / 8, "any": pytest.approx(1 / 3)}
    assert held[2] == {"best": 1, "first": 1, "longest": 3 / 8, "last": 1, "any": pytest.approx(2 / 3)}


def test_an_update_trains_by_kept_weights_and_returns_its_own(policy):
    seconds = Counter()
    rows, advantages = papers._sampled(policy, 1, seconds)
    again, _ = papers._sampled(policy, 1, Counter())
    assert all(map(torch.equal, rows.completions, again.completions))
    assert (advantages != 0).all()
    before = [weight.clone() for weight in policy.parameters]
    optimizer = torch.optim.SGD(policy.parameters, lr=1.0)
    nothing = [torch.zeros(n) for n in rows.lengths]
    weights, _ = papers._updated(policy, optimizer, rows, advantages, "CF", seconds, (nothing, nothing))
    assert all(map(torch.equal, before, policy.parameters))
    assert {weight for row in weights for weight in row.tolist()} >= {0.5, 4.0, 1.5}
    assert {*seconds} == {"sampling", "reward", "forward", "credit", "backward", "optimizer"}


def test_a_run_goes_on_from_its_pieces_and_writes_every_table(tmp_path, monkeypatch):
    calls = []

    def table(settings, folder):
        """What is shown."""
        calls.append((settings.groups, folder))
        return {"CF": {"share": 0.25, "Spearman": {"value": 0.5, "low": 0.4, "high": 0.6}, "nothing": None, "n": 7}}

    monkeypatch.setattr(papers, "TABLES", {"table": table})
    for _ in range(2):
        pieces = Pieces(tmp_path, {}, {"environment": {"commit": "0123456789ab"}})
        document = papers.run(pieces, tmp_path, papers.PapersSettings(groups=2))
    assert calls == [(2, tmp_path)]
    text = papers.markdown(document | {"command": "papers", "environment": {"commit": "0123456789ab"}})
    assert "## table\n\nWhat is shown.\n" in text
    assert "| CF | 0.25 | 0.50 (0.40 to 0.60) | – | 7 |" in text
