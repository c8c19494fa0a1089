"""The evidence suite: planted roles against the text itself, judges against brute force, runs that go on."""

import itertools
import json
import random
import re
import statistics
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import logging

from benchmarks.evidence import methods, planted, rollouts
from benchmarks.evidence.agreement import (
    agreement,
    auroc_alone,
    chance,
    correlation,
    ordered_pairs,
    position_free_auroc,
)
from benchmarks.evidence.cases import planted_case, sampled_case
from benchmarks.evidence.command import main
from benchmarks.evidence.methods import METHODS, Question
from benchmarks.evidence.models import Subject, fingerprint
from benchmarks.evidence.problems import KINDS, STEP_WORDS, generate, training_rows
from benchmarks.harness.ledger import Ledger
from benchmarks.harness.tables import table
from tests.support.sources import SOURCE
from trainer.analyze.statistics import bootstrap_interval
from trainer.embedded.warmup import WarmupConfig, small_model, train_tokenizer
from trainer.rewards.numbers import final_number

pytestmark = pytest.mark.slow

FACT = re.compile(r"(\w+) (?:(?P<given>\d+)"
                  r"|gets (?P<n>\d+) (?P<how>above|below|times) (?P<of>\w+)"
                  r"|gets all of (?P<first>\w+) with (?P<second>\w+))\.")  # fmt: skip
COMPUTATION = re.compile(
    r"As (\w+) gets (.+?), and (\w+ \d+(?: and \w+ \d+)?), we find (\d+)([-+*])(\d+)=(\d+), so (\w+) (\d+)\.\n"
)
READ = re.compile(r"(\w+) (\d+)")
STATEMENT = re.compile(r"(\w+) (\d+)\.\n")
SIGNS = {"above": "+", "below": "-", "times": "*"}


def facts_of(question):
    """For each owner what the text says: a number, or a sign, owners that are read and a number."""
    facts = {}
    for match in FACT.finditer(question):
        if match["given"]:
            facts[match[1]] = int(match["given"])
        elif match["how"]:
            facts[match[1]] = (SIGNS[match["how"]], [match["of"]], int(match["n"]))
        else:
            facts[match[1]] = ("+", [match["first"], match["second"]], None)
    assert len(facts) == question.count(".")
    return facts, re.search(r"How many coins has (\w+)\?", question)[1]


def apply(sign, a, b):
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def solve(facts, owner):
    fact = facts[owner]
    if isinstance(fact, int):
        return fact
    sign, read, number = fact
    values = [solve(facts, other) for other in read] + ([] if number is None else [number])
    return apply(sign, *values)


@pytest.mark.parametrize("kind", KINDS)
def test_planted_roles_follow_from_the_text_alone(kind):
    for problem in itertools.islice(generate("test", 3, kinds=[kind]), 40):
        facts, target = facts_of(problem.question)
        assert problem.gold == solve(facts, target)
        stated, rests_on, replaced = {}, {}, []
        for k, unit in enumerate(problem.units):
            line = problem.solution[unit.start : unit.end]
            if computed := COMPUTATION.fullmatch(line):
                owner, relation, reads, left, sign, right, result, again, stated_result = computed.groups()
                assert apply(sign, int(left), int(right)) == int(result) == int(stated_result)
                assert owner == again
                if not unit.origin:
                    assert f"{owner} gets {relation}." in problem.question
                told, read, number = facts[owner]
                assert READ.findall(reads) == [(other, str(stated.get(other, facts[other]))) for other in read]
                assert sign == told
                operands = [stated.get(other, facts[other]) for other in read] + [number] * (number is not None)
                assert operands[0] == int(left)
                if operands[1] != int(right):
                    replaced.append(k)
                sources = {j for other in read for j in rests_on.get(other, ())}
            elif said := STATEMENT.search(line):
                owner, result, sources = said[1], said[2], {j for j in rests_on.get(said[1], ())}
                assert int(result) == stated.get(owner, facts[owner])
            else:
                assert unit.role == "header"
                assert (unit.direct, unit.total, unit.quantity) == (False, False, None)
                continue
            assert problem.quantities[unit.quantity].owner == owner
            stated[owner] = int(result)
            rests_on[owner] = rests_on.get(owner, set()) | sources | {k}
        read = facts[target][1] if kind == "implicit" else [target]
        assert (target in stated) == (kind != "implicit")
        if kind == "implicit":
            sign, _, number = facts[target]
            operands = [stated.get(owner, facts[owner]) for owner in read] + [number] * (number is not None)
            assert apply(sign, *operands) == problem.answer
        else:
            assert stated[target] == problem.answer
        assert {k for k, unit in enumerate(problem.units) if unit.total} == set().union(
            *(rests_on.get(owner, set()) for owner in read)
        )
        for unit in problem.units:
            if unit.quantity is not None:
                assert unit.direct == (problem.quantities[unit.quantity].owner in read)
        assert [k for k, unit in enumerate(problem.units) if unit.origin] == replaced
        assert (problem.answer != problem.gold) == bool(replaced) == (kind == "wrong")
        assert any(unit.role == "idle step" and not unit.total for unit in problem.units)
        assert any(unit.role == "repeat" for unit in problem.units) == (kind == "repeat")


def test_lines_and_the_closing_make_up_the_solution_and_numbers_tell_owners_apart():
    for problem in itertools.islice(generate("test", 1), 60):
        assert [unit.start for unit in problem.units] == [0, *(unit.end for unit in problem.units)][:-1]
        assert problem.solution[problem.units[-1].end :] == f"#### {problem.answer}"
        assert all(problem.solution[unit.end - 1] == "\n" for unit in problem.units)
        results = [int(match[7]) for match in COMPUTATION.finditer(problem.solution)]
        assert len(set(results)) == len(results)


def test_a_line_that_computes_nothing_has_as_many_words_and_signs_as_one_that_does():
    """So length tells nothing: a header was a token longer than a step, and length found the total truth at 0.43."""
    lengths, totals = [], []
    for problem in itertools.islice(generate("test", 0), 200):
        words = [len(re.findall(r"\w+|[^\w\s]", problem.solution[u.start : u.end])) for u in problem.units]
        for unit, count in zip(problem.units, words, strict=True):
            adds_two = unit.role in ("step", "idle step") and problem.quantities[unit.quantity].joins
            assert count == (28 if adds_two else STEP_WORDS), problem.solution[unit.start : unit.end]
        lengths.append([float(count) for count in words])
        totals.append([unit.total for unit in problem.units])
    found = agreement(lengths, totals, draws=200)["auroc"]
    assert found["low"] < 0.5 < found["high"]


def test_equal_seeds_give_equal_problems_and_kinds_take_turns():
    first = list(itertools.islice(generate("test", 5), 8))
    assert first == list(itertools.islice(generate("test", 5), 8))
    assert [problem.kind for problem in first] == [*KINDS, *KINDS]
    assert first[0].question != next(generate("test", 6)).question


def test_solutions_to_learn_from_are_right_and_some_break_off():
    rows = training_rows("train", 0, 200)
    held_out = training_rows("test", 0, 200, cut=0.0, implicit=0.0)
    for row in rows + held_out:
        facts, target = facts_of(row["question"])
        assert final_number(row["answer"]) == solve(facts, target)
    written = [f"so {facts_of(row['question'])[1]} " in row["answer"] for row in rows + held_out]
    assert all(written[200:])
    assert 10 < written[:200].count(False) < 50
    assert not {row["question"] for row in rows} & {row["question"] for row in held_out}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: next(generate("dev", 0)), "split must be one of"),
        (lambda: next(generate("test", 0, kinds=["odd"])), "kinds must be among .*got 'odd'"),
        (lambda: training_rows("dev", 0, 1), "split must be one of"),
    ],
)
def test_unknown_splits_and_kinds_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- Cases ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject():
    """A random model of a few thousand parameters that reads the problems' own tokens."""
    tokenizer = train_tokenizer(training_rows("train", 0, 200), 400)
    config = WarmupConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    torch.manual_seed(0)
    model = small_model(config, tokenizer).eval()
    return Subject("trained", model, tokenizer, fingerprint(model), None)


def test_units_of_a_case_decode_to_the_lines(subject):
    for problem in itertools.islice(generate("test", 0), 12):
        case, decode = planted_case(problem, subject.tokenizer), subject.tokenizer.decode
        for span, unit in zip(case.units, problem.units, strict=True):
            assert decode(case.completion[span.start : span.end]) == problem.solution[unit.start : unit.end]
        assert decode(case.closing) == f"#### {problem.answer}"
        assert decode(case.completion[case.answer.start : case.answer.end]).strip() == str(problem.answer)
        assert case.boundaries == [*(span.start for span in case.units), case.reasoning_end]
        assert case.completion[-1] == subject.tokenizer.eos_token_id
        assert case.by_token().units == [(t, t + 1) for t in range(case.reasoning_end)]
        again = sampled_case(case.prompt.tolist(), case.completion.tolist(), subject.tokenizer)
        assert torch.equal(again.completion, case.completion)
        assert (again.answer, again.reasoning_end) == (case.answer, case.reasoning_end)


def asked(subject, count=3):
    problems = list(itertools.islice(generate("test", 0), count))
    cases = [planted_case(problem, subject.tokenizer) for problem in problems]
    return Question(subject, cases, [problem.gold for problem in problems], 0, 24, methods.siblings)


def answer_logprob(subject, case, completion):
    """By one plain forward."""
    ids = torch.cat([case.prompt, completion])
    with torch.no_grad():
        rows = subject.model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
    places = range(len(case.prompt) + case.answer.start, len(case.prompt) + case.answer.end)
    return sum(rows[t - 1, ids[t]].item() for t in places)


def test_masking_and_the_masked_rest_are_differences_of_plain_forwards(subject):
    question = asked(subject)
    masked, rest = (METHODS[name].run(question).values for name in ("CF", "masked rest"))
    for b, case in enumerate(question.cases):
        base, shown = answer_logprob(subject, case, case.completion), []
        for k, unit in enumerate(case.units):
            alone, onwards = case.completion.clone(), case.completion.clone()
            alone[unit.start : unit.end] = question.placeholder
            onwards[unit.start : case.reasoning_end] = question.placeholder
            assert masked[b][k].item() == pytest.approx(base - answer_logprob(subject, case, alone), abs=1e-4)
            shown.append(answer_logprob(subject, case, onwards))
        gains = [after - before for before, after in itertools.pairwise([*shown, base])]
        assert rest[b].tolist() == pytest.approx(gains, abs=1e-4)


def test_entropy_is_that_of_the_distribution_each_token_was_drawn_from(subject):
    question = asked(subject, 1)
    case = question.cases[0]
    ids = torch.cat([case.prompt, case.completion])
    with torch.no_grad():
        logp = subject.model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)[len(case.prompt) - 1 :]
    expected = [entropy[unit.start : unit.end].mean().item() for unit in case.units]
    assert METHODS["entropy"].run(question).values[0].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.costly])
def test_every_method_gives_a_finite_number_per_unit_and_repeats_itself(subject, name):
    question = asked(subject, 2)
    once, again = METHODS[name].run(question), METHODS[name].run(question)
    assert [len(row) for row in once.values] == [len(case.units) for case in question.cases]
    for row, other in zip(once.values, again.values, strict=True):
        assert torch.isfinite(row).all()
        assert torch.equal(row, other)


# --- Truths that take sampling ----------------------------------------------------------------------------------


def test_step_values_are_shares_of_continuations_by_prefix(subject, monkeypatch):
    problem = next(generate("test", 0, kinds=["wrong"]))
    case = planted_case(problem, subject.tokenizer)
    first = case.units[0].end

    def continued(model, tokenizer, prompts, *, max_completion_length, keys):
        shown = [len(prompt) - len(case.prompt) for prompt in prompts]
        own = [length >= first or key[-1] == 0 for length, key in zip(shown, keys, strict=True)]
        return SimpleNamespace(texts=[f"#### {problem.answer if yes else problem.gold}" for yes in own])

    monkeypatch.setattr(rollouts, "generate", continued)
    (shares,) = rollouts.step_values(subject, [case], [problem.answer], [problem.gold], samples=4, seed=0, room=8)
    later = len(case.units)
    assert shares["own"] == [0.25, *[1.0] * later]
    assert shares["right"] == [0.75, *[0.0] * later]


def test_the_oracle_puts_the_likeliest_other_token_and_the_control_the_token_itself(subject, monkeypatch):
    problem = next(generate("test", 0, kinds=["idle"]))
    case = planted_case(problem, subject.tokenizer).by_token()
    prompt, completion = case.prompt.tolist(), case.completion.tolist()
    seen = []

    def continued(model, tokenizer, prompts, *, max_completion_length):
        seen.append([row[len(prompt) :] for row in prompts])
        kept = [row[len(prompt) :] == completion[: len(row) - len(prompt)] for row in prompts]
        return SimpleNamespace(texts=[f"\n#### {problem.gold + (not same)}" for same in kept])

    monkeypatch.setattr(rollouts, "generate", continued)
    flips = rollouts.substitution_oracle(subject, case, problem.gold, room=8)
    assert flips == {"critical": [True] * case.reasoning_end, "control": [False] * case.reasoning_end}
    with torch.no_grad():
        ids = torch.cat([case.prompt, case.completion])
        logits = subject.model(input_ids=ids[None]).logits[0]
    for t, row in enumerate(seen[0]):
        order = logits[len(prompt) + t - 1].argsort(descending=True).tolist()
        assert row == [*completion[:t], next(token for token in order if token != completion[t])]
    assert seen[1] == [completion[: t + 1] for t in range(case.reasoning_end)]


# --- Judges -----------------------------------------------------------------------------------------------------


def test_a_rule_by_position_alone_has_a_position_free_auroc_of_one_half():
    rng = random.Random(0)
    truths = [[rng.random() < (k + 1) / 8 for k in range(7)] for _ in range(20)]  # what matters comes late
    rows = [[float(k) for k in range(7)] for _ in truths]
    assert auroc_alone(rows, truths) == 0.5
    assert auroc_alone([[-x for x in row] for row in rows], truths) == 0.5
    found = agreement(rows, truths, draws=50)
    assert found["plain_auroc"]["value"] > 0.6
    assert (found["auroc"]["low"], found["auroc"]["high"]) == (0.5, 0.5)
    perfect = agreement([[float(t) for t in row] for row in truths], truths, draws=50)
    assert [perfect[name]["value"] for name in ("auroc", "plain_auroc", "spearman", "recall")] == [1.0] * 4


def test_pairs_are_counted_apart_by_which_comes_first():
    assert ordered_pairs([3.0, 1.0, 2.0, 2.0], [False, True, True, False]) == (0.0, 2, 0.5, 2)
    assert position_free_auroc([(1.0, 2, 3.0, 3), (0.0, 2, 0.0, 1)]) == (1 / 4 + 3 / 4) / 2


def test_a_method_without_ranks_has_correlation_zero_and_constant_truths_are_left_out():
    found = correlation([[1.0, 1.0], [1.0, 2.0], [0.0, 5.0]], [[0.0, 1.0], [0.3, 0.3], [0.0, 1.0]], draws=20)
    assert found["value"] == 0.5
    assert found["problems"] == 2
    assert correlation([[1.0, 2.0]], [[0.5, 0.5]])["value"] is None
    with pytest.raises(ValueError, match="no problem has both classes"):
        agreement([[1.0]], [[True]])


@pytest.mark.parametrize("truth", ["direct", "total"])
def test_random_scores_of_planted_truths_have_expectation_one_half_and_honest_intervals(truth):
    """Of 100 draws 95 % of the bootstrap intervals hold 0.5; one draw only may well miss it, as 0.45 did."""
    problems = list(itertools.islice(generate("test", 0), 120))
    truths = [[bool(getattr(unit, truth)) for unit in problem.units] for problem in problems]
    rng, found = random.Random(0), []
    for _ in range(100):
        pairs = [ordered_pairs([rng.random() for _ in row], row) for row in truths]
        found.append(bootstrap_interval(position_free_auroc, pairs, draws=120))
    spread = statistics.stdev(one.value for one in found)
    assert abs(statistics.fmean(one.value for one in found) - 0.5) < 3 * spread / len(found) ** 0.5
    assert 0.9 <= statistics.fmean(one.low <= 0.5 <= one.high for one in found) <= 0.99
    # What is reported in their place: the mean of many draws, and where 95 % of them fall.
    reported = chance(ordered_pairs, position_free_auroc, truths)
    assert abs(reported.value - 0.5) < 0.01
    assert reported.high - reported.low == pytest.approx(4 * spread, rel=0.25)


def test_chance_is_the_same_each_time_and_follows_the_figure_asked_for():
    truths = [[True, False, False, False]] * 30
    found = agreement(None, truths, shares=(0.5,), draws=30)
    assert found == agreement(None, truths, shares=(0.5,), draws=30)
    assert found["recall"]["value"] == pytest.approx(0.25, abs=0.05)
    assert found["recall_at_50%"]["value"] == pytest.approx(0.5, abs=0.05)
    assert found["auroc"] is None  # no positive has an earlier negative
    assert abs(correlation(None, [[0.0, 1.0, 2.0]] * 40, draws=30)["value"]) < 0.06
    assert chance(lambda s, _: len(s), sum, [[0.0], [0.0, 1.0]]) == (3.0, 3.0, 3.0)


def test_a_table_has_a_rule_and_a_line_for_each_row():
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


# --- Runs -------------------------------------------------------------------------------------------------------


def test_a_ledger_goes_on_after_a_line_that_was_cut_off(tmp_path):
    path, calls = tmp_path / "ledger.jsonl", []
    for _ in range(2):
        ledger = Ledger(path, SOURCE)
        assert ledger.get(("a", 1), lambda: calls.append(1) or {"x": (1, 2)}) == {"x": [1, 2]}
    assert len(calls) == 1
    with path.open("a") as lines:
        lines.write('{"key": ["b", 2], "val')
    ledger = Ledger(path, SOURCE)
    assert (("a", 1) in ledger, ("b", 2) in ledger) == (True, False)
    ledger.get(("b", 2), lambda: {"y": 1})
    assert set(Ledger(path, SOURCE)) == {("a", 1), ("b", 2)}
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(ValueError, match=r"ledger.jsonl, line 1: is not a record"):
        Ledger(path, SOURCE)


def saved(subject, tmp_path):
    logging.disable_progress_bar()
    folder = tmp_path / "model"
    subject.model.save_pretrained(folder)
    subject.tokenizer.save_pretrained(folder)
    (folder / "warmup.json").write_text(json.dumps({"held_out_accuracy": 0.25}))
    return folder


def test_planted_writes_its_tables_and_a_second_run_asks_nothing_again(subject, tmp_path, monkeypatch, capsys):
    folder = saved(subject, tmp_path)
    command = ["planted", "--folder", str(tmp_path), "--results", str(tmp_path), "--model", str(folder)]
    command += ["--problems", "8", "--batch", "4", "--valued", "4", "--samples", "1", "--chains", "0", "--room", "4"]
    command += ["--draws", "5", "--commit", "none", "--methods", "position", "CF"]
    assert main(command) == 0
    first = json.loads((tmp_path / "evidence-planted.json").read_text())
    assert first["models"]["trained"]["accuracy"] == 0.25
    assert first["models"]["trained"]["methods"]["CF"]["problems"] == 8
    assert list(first["models"]["trained"]["methods"]) == ["random", "position", "CF"]
    assert first["models"]["trained"]["methods"]["position"]["total"]["auroc"]["value"] == 0.5
    assert "| CF |" in (tmp_path / "evidence-planted.md").read_text()
    assert (tmp_path / "evidence-planted.png").read_bytes().startswith(b"\x89PNG")

    def asked_again(*_, **__):
        raise AssertionError("this is known already")

    monkeypatch.setattr(planted, "_asked", asked_again)
    monkeypatch.setattr(planted, "step_values", asked_again)
    monkeypatch.setattr(planted, "score_counterfactuals", asked_again)
    monkeypatch.setattr("benchmarks.evidence.command.planted_tables.plot", lambda _, path: path)
    assert main(command) == 0
    second = json.loads((tmp_path / "evidence-planted.json").read_text())
    assert first["models"] == second["models"]
    assert main([*command, "--samples", "0"]) == 1
    assert "samples must be at least 1" in capsys.readouterr().err


def test_fidelity_compares_with_exact_masking_by_what_is_fed_beyond_a_plain_forward(subject, tmp_path):
    command = ["fidelity", "--folder", str(tmp_path), "--results", str(tmp_path)]
    command += ["--model", str(saved(subject, tmp_path)), "--problems", "3", "--batch", "3", "--draws", "5"]
    assert main([*command, "--commit", "none", "--methods", "position", "masked rest", "entropy"]) == 0
    document = json.loads((tmp_path / "evidence-fidelity.json").read_text())
    assert list(document["methods"]) == ["CF", "position", "masked rest", "entropy"]
    exact, free = document["methods"]["CF"], document["methods"]["position"]
    assert (exact["with_cf"]["value"], exact["token_cost"], exact["cpu_cost"]) == (1.0, 1.0, 1.0)
    assert (free["extra_tokens"], free["token_cost"]) == (0.0, 0.0)
    (batch,) = planted.batches(planted.Settings(problems=3, batch=3), subject, 3)
    beginnings, plain = set(), 0  # a token is fed once for all sequences that begin alike up to it
    for case in batch.cases:
        rows = [case.completion, *(case.completion.clone() for _ in case.units)]
        for row, unit in zip(rows[1:], case.units, strict=True):
            row[unit.start : unit.end] = subject.tokenizer.pad_token_id
        for row in rows:
            ids = [*case.prompt.tolist(), *row[: case.answer.end - 1].tolist()]
            beginnings |= {tuple(ids[: n + 1]) for n in range(len(ids))}
        plain += len(case.prompt) + case.answer.end - 1
    assert exact["extra_tokens"] * 3 == len(beginnings) - plain
    assert "| masked rest |" in (tmp_path / "evidence-fidelity.md").read_text()
