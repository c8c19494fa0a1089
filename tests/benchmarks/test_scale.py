"""The replay over ranks: packs are the library's, times add up by hand, dealing by rows brings the idle share down."""

import json
import re

import numpy as np
import pytest
import torch

from benchmarks.explain.rates import GPUS
from benchmarks.harness.workloads import Job, Rollouts
from benchmarks.scale import command, idle_packs, meeting, trees
from benchmarks.scale.cost import ACROSS, INSIDE, Sharded, traffic
from benchmarks.scale.replay import DEALS, Group, counted, groups_of, in_step, packed, shares
from cfa_kernels.packing.packs import lay_out
from cfa_kernels.scoring.batch import Row
from cfa_kernels.scoring.plan import ScoringOptions, queries_of
from cfa_kernels.span import Span
from tests.conftest import REPOSITORY


def rows_of(group: int, rng: np.random.Generator) -> list[Row]:
    """Three completions of a prompt; groups share no token, completions share their first five."""
    base = 1000 * (group + 1)
    prompt, rows = base + np.arange(rng.integers(4, 12)), []
    for b in range(3):
        completion = base + 100 * (b + 1) + np.arange(rng.integers(12, 40))
        completion[:5] = base + 50 + np.arange(5)
        end = len(completion)
        rows.append(Row(prompt, completion, [Span(1, 4), Span(6, 10)], Span(end - 2, end)))
    return rows


@pytest.mark.parametrize("most", [170, 250, 10_000])
def test_packs_of_a_replay_are_those_that_the_library_lays_out(most):
    rng = np.random.default_rng(0)
    bundles = [[queries_of(row, ScoringOptions(), 99) for row in rows_of(g, rng)] for g in range(9)]
    expected = [pack.num_tokens for pack in lay_out([bundle for group in bundles for bundle in group], most)]
    assert packed([counted(group) for group in bundles], most) == expected
    assert most == 10_000 or len(expected) > 3


def test_a_completion_that_no_forward_holds_is_refused():
    with pytest.raises(ValueError, match="--rows: a forward must hold the 30 rows of a completion, got 20"):
        packed([[[10, 25], [15]], [[30]]], 20)


def test_a_forward_takes_as_long_as_on_the_rank_with_the_most_rows_in_it():
    outcome = in_step([[100, 50], [80], []], lambda rows: float(rows))
    assert (outcome.forwards, outcome.rows) == (2, 230 / 3)
    assert outcome.whole == 150
    assert outcome.idle == pytest.approx(1 - 230 / 3 / 150)
    assert in_step([[70]], float).idle == 0
    assert in_step([[], []], float).idle == 0
    both = outcome + in_step([[10], [10], [10]], float)
    assert both.idle == pytest.approx(1 - (230 / 3 + 10) / 160)


def lengths(count: int, live: bool = True) -> list[Group]:
    """Groups whose rows spread about as those of GSM8K: 1,660 in the mean, 860 around it."""
    drawn = np.random.default_rng(1).gamma(3.7, 450, count).astype(int) + 10
    return [Group([[rows]], [[rows]], rows, rows, live or i % 2 == 0) for i, rows in enumerate(drawn.tolist())]


def test_every_way_of_dealing_gives_each_sampled_group_to_one_rank():
    for live in (False, True):
        groups = lengths(10, live=False)
        for name, dealt in shares(groups, 3, 4, live=live):
            assert len(dealt) == 3, name
            given = sorted(group.rows for share in dealt for group in share)
            if name == "as sampled":
                expected = given
                assert len(given) == 12 if not live else len(given) < 12
            assert given == expected


def test_dealt_by_rows_64_ranks_are_idle_for_less_than_5_percent_and_as_sampled_for_more_than_15():
    idle = {
        name: in_step([packed([group.scored for group in share], 65_536) for share in dealt], float).idle
        for name, dealt in shares(lengths(653), 64, 16, live=False)
    }
    assert idle["by rows"] < 0.05
    assert idle["as sampled"] > 0.15
    assert idle.keys() == DEALS.keys()


def test_a_forward_takes_its_products_or_its_gathering_whichever_is_longer():
    model = Sharded.of("qwen3-tiny", GPUS["H200"])
    hidden, layers = 64, 2
    of_layer = hidden * (64 + 32 + 32 + 64) + 3 * hidden * 128 + 2 * 16 + 2 * hidden  # four products, MLP, norms
    assert model.layers == layers * of_layer + hidden
    assert model.weights > model.layers
    assert model.bytes == 2 * model.weights
    assert model.moving(1e9) == 0
    node, many = (Sharded(10, 20, 2, 100, GPUS["H200"], ranks) for ranks in (8, 64))
    assert node.moving(1e9) == pytest.approx(7 / 8 * 1e9 / INSIDE)
    assert many.moving(1e9) == pytest.approx(63 / 64 * 1e9 / ACROSS)
    assert many.forward(1) == many.moving(40)
    large = 10**9
    assert many.forward(large) == pytest.approx(2 * 10 * large / GPUS["H200"].halves)
    assert many.update(large) == pytest.approx(3 * many.forward(large))
    assert many.update(1) == pytest.approx(many.moving(2 * 40 + 20 * 4))


def small_rollouts() -> Rollouts:
    """Two groups of two completions, one with equal rewards."""
    prompts = [torch.arange(4), torch.arange(4), torch.arange(6) + 10, torch.arange(6) + 10]
    completions = [torch.arange(10) + 100 * b for b in range(1, 5)]
    job = Job("made", "made here", prompts, completions, [[Span(1, 3), Span(3, 5)]] * 4, [Span(8, 10)] * 4, 0, None)
    return Rollouts(job, 2, torch.tensor([1.0, 0, 1, 1]), torch.tensor([1.0, -1, 0, 0]))


def test_groups_of_rollouts_have_their_tokens_rows_and_whether_rewards_differ():
    first, second = groups_of(small_rollouts())
    branches = 9 + (9 - 1) + (9 - 3)  # rows of a completion, and from each masked span on
    assert (first.tokens, first.rows, first.live) == (24, 4 + 2 * branches, True)
    assert (second.tokens, second.rows, second.live) == (26, 6 + 2 * branches, False)
    assert first.scored[0][-1] == first.rows
    assert first.scored[1] == [4 + branches]
    assert first.trained == [[4 + 2 * 9]]


def test_bytes_between_controller_and_workers_are_those_of_the_dtypes():
    found = traffic(small_rollouts())
    p, t, k = 5, 10, 2  # means
    assert found.answers == (k + 1) * (p + t) * 4
    assert found.requests == (k + 1) * (3 * p + 5 * t) * 8 + found.answers
    assert found.tree == (p / 2 + t + 2 * (k + 1)) * 8 + (k + 1) * 4
    assert found.weights == 4 * t


def test_a_page_is_made_and_put_in_its_place(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "gsm8k_rollouts", lambda problems, mixed: small_rollouts())
    page = tmp_path / "scale.md"
    given = ["--model", "qwen3-tiny", "--ranks", "1", "2", "--completions", "4", "--at", "2", "--rows", "64"]
    page.write_text(f"before\n<!-- python -m benchmarks scale {' '.join(given)} -->\nold\n<!-- end -->\nafter\n")
    assert command.main([*given, "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!--")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert text.count("| 2 | ") == 2
    assert "2 problems (made here), 2 completions each" in text
    assert capsys.readouterr().out.strip() in text
    with pytest.raises(SystemExit):
        command.main([*given, "--completions", "3"])
    assert "3 are not whole groups of 2" in capsys.readouterr().err


def test_a_pack_of_one_token_and_a_full_one_are_measured(monkeypatch):
    monkeypatch.setattr(idle_packs, "SEQUENCE", 8)
    idle, full = idle_packs.seconds("qwen3-tiny", rows=16, rounds=1)
    assert idle > 0 < full


@pytest.mark.slow
def test_the_meeting_of_two_processes_is_measured_and_has_a_deadline(monkeypatch):
    assert 0 < meeting.seconds(3) < meeting.SECONDS
    monkeypatch.setattr(meeting, "SECONDS", 0.01)
    with pytest.raises(TimeoutError, match=r"did not end in 0\.01 s"):
        meeting.seconds(3)


def test_every_share_that_the_page_quotes_is_in_its_tables_and_64_balanced_ranks_are_idle_for_less_than_5_percent():
    lines = (REPOSITORY / "docs" / "scale.md").read_text(encoding="utf-8").splitlines()
    tables = "\n".join(line for line in lines if line.startswith("| "))
    quoted = re.findall(r"\d+\.\d%", "\n".join(line for line in lines if not line.startswith("| ")))
    assert len(quoted) > 5
    assert not [share for share in quoted if f"| {share}" not in tables]
    head = next(line for line in lines if line.startswith("| ranks"))
    rows = [line for line in lines if line.startswith("| 64 |")]
    place = [cell.strip() for cell in head.split("|")].index("by rows")
    assert len(rows) == 2
    assert all(float(row.split("|")[place].strip().rstrip("%")) < 5 for row in rows)


def test_measurements_are_a_table_with_their_machine(monkeypatch):
    monkeypatch.setattr(idle_packs, "seconds", lambda: (0.01, 0.5))
    monkeypatch.setattr(meeting, "seconds", lambda: 2e-4)
    text = command.measurements()
    assert "| idle pack relative to a full one | 2.0% |" in text
    assert "gloo over loopback | 0.20 ms |" in text
    assert f"torch {torch.__version__.split('+')[0]}" in text


@pytest.mark.slow
def test_trees_and_requests_on_a_model_in_pieces_find_the_same_scores_and_trees_feed_less_than_half(monkeypatch):
    found = trees.race(1, model="qwen3-tiny", layers=2, problems=2)  # raises where scores differ
    assert 0 < found["difference"] <= trees.TOLERANCE
    for one in found["contenders"].values():
        assert len(one["cpu_seconds_rounds"]) == len(one["seconds_rounds"]) == 1
        assert one["cpu_seconds"] > 0 < one["seconds"]
    assert all(0.2 < share["tokens"] < 0.5 for share in trees.shares(found).values())
    monkeypatch.setattr(trees, "SECONDS", 0.01)
    with pytest.raises(TimeoutError, match=r"did not end in 0\.01 s"):
        trees.race(1, model="qwen3-tiny", layers=2, problems=2)


def test_a_race_is_a_table_and_a_file_of_its_figures(monkeypatch, tmp_path):
    figures = {"tokens": 50, "forwards": 1, "cpu_seconds": 1.0, "seconds": 2.0}
    contenders = {"trees": figures, "requests": figures | {"tokens": 125, "cpu_seconds": 4.0}}
    job = {"completions": 4, "source": "made here", "distinct_prompts": 2, "spans_mean": 1.0}
    model = {"name": "qwen3-tiny", "layers": 2, "vocabulary": 9, "dtype": "float32"}
    found = {"contenders": contenders, "difference": 1e-6, "job": job, "model": model, "processes": 2, "rounds": 1}
    with pytest.raises(ValueError, match="problems must be at least 2, one for each process, got 1"):
        trees.race(problems=1)
    monkeypatch.setattr(trees, "race", lambda: found)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "REPOSITORY", tmp_path.parent)
    text = command.raced("python -m benchmarks scale --race")
    assert "| requests | 125 | 4.00 | 2.00 | 40.0% | 25.0% | 100.0% |" in text
    (file,) = tmp_path.glob("*-scale.json")
    share = json.loads(file.read_text())["trees_share_of"]["requests"]
    assert share == {"tokens": 0.4, "cpu_seconds": 0.25, "seconds": 1}
