"""The evidence suite: planted roles against the text itself, judges against brute force, runs that go on."""

import itertools
import json
import random
import re
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.harness.results import Pieces
from benchmarks.research import planted
from benchmarks.research.agreement import AUROC, SPEARMAN, agreement, recall_at, recall_curve
from benchmarks.research.command import main
from benchmarks.research.demo_model.warmup import WarmupConfig, small_model, train_tokenizer
from benchmarks.research.models import Subject
from benchmarks.research.planted import METHODS, PlantedSettings, ask, lines_of, rows_of
from benchmarks.research.problems import KINDS, LENGTH, WORDS, generate, training_rows
from cfa_kernels import SpanRules
from trainer.analyze.statistics import bootstrap_interval
from trainer.rewards.numbers import final_number

pytestmark = pytest.mark.slow

FACT = re.compile(
    r"(\w+)(?:=(\d+)| gets (\d+) (above|below|times) (\w+)| gets half of (\w+)| totals (\w+) and (\w+))\."
)
COMPUTATION = re.compile(
    r"(?:.* that |Now )?((\w+) (?:gets|totals) .+?\.) ((?:\w+=\d+, )+)(\d+)([-+*/])(\d+)(?:=(\d+)\+(\d+))?=(\d+)\."
    r" So (\w+)=(\d+)\.\n"
)
READ = re.compile(r"(\w+)=(\d+)")
STATEMENT = re.compile(r"(\w+)=(\d+)\.\n")
SIGNS = {"above": "+", "below": "-", "times": "*"}
# The patterns of content that table 5 of "Beyond Uniform Credit" tells apart.
PATTERNS = {
    "calculation chain": r"=.*=",
    "multiply or divide": r"\d[*/]\d",
    "proportion": r"\b(half|third|per|each)\b",
    "total": r"\b(totals?|sum)\b",
    "conclusion": r"\A(So|Therefore)\b",
    "set-up": r"\ALet\b",
    "step header": r"\AStep \d:",
}


def facts_of(question):
    """For each owner what the text says: a number, or a sign, owners that are read and a number."""
    facts = {}
    for owner, given, number, how, one, whole, first, second in FACT.findall(question):
        facts[owner] = int(given) if given else (SIGNS[how], [one], int(number)) if how else ("/", [whole], 2)
        if first:
            facts[owner] = ("+", [first, second], None)
    assert len(facts) == question.count(".")
    return facts, re.search(r"How many coins has (\w+)\?", question)[1]


def apply(sign, a, b):
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign]


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
        *lines, _ = problem.solution.splitlines(keepends=True)
        for k, (unit, line) in enumerate(zip(problem.units, lines, strict=True)):
            if computed := COMPUTATION.fullmatch(line):
                relation, owner, reads, left, sign, right, once, more, result, again, stated_result = computed.groups()
                assert apply(sign, int(left), int(right)) == int(result) == int(stated_result)
                assert (sign == "*") == bool(once)
                assert not once or int(once) + int(more) == int(result)
                assert owner == again
                if not unit.origin:
                    assert relation in problem.question
                operation, read, number = facts[owner]
                assert READ.findall(reads) == [(other, str(stated.get(other, facts[other]))) for other in read]
                assert sign == operation
                operands = [stated.get(other, facts[other]) for other in read] + [number] * (number is not None)
                assert operands[0] == int(left)
                if operands[1] != int(right):
                    replaced.append(k)
                sources = {j for other in read for j in rests_on.get(other, ())}
            elif statement := STATEMENT.search(line):
                owner, result, sources = statement[1], statement[2], {j for j in rests_on.get(statement[1], ())}
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


def test_all_lines_are_equally_long_and_spans_hold_every_pattern_of_content(subject):
    """So length tells nothing: a header was a token longer than a step, and length found the total truth at 0.43."""
    seen, decode = set(), subject.tokenizer.decode
    for problem in itertools.islice(generate("test", 0), 200):
        *lines, last = problem.solution.splitlines(keepends=True)
        assert (len(lines), last) == (len(problem.units), f"#### {problem.answer}")
        assert {len(WORDS.findall(line)) for line in lines} == {LENGTH}
        results = [match[9] for match in COMPUTATION.finditer(problem.solution)]
        assert len(set(results)) == len(results)  # a number tells its owner
        (case,) = cases_of(subject, [problem])
        assert [decode(case.completion[start:end]) for start, end in case.spans] == lines
        assert {unit.end - unit.start for unit in case.spans} == {LENGTH + 1}
        assert decode(case.completion[case.end :]) == f"#### {problem.answer}{subject.tokenizer.eos_token}"
        assert [decode(token) for token in case.completion[slice(*case.answer)]] == [*str(problem.answer)]
        for start, end in itertools.chain(*SpanRules().ranked_intervals("".join(lines))):
            seen |= {name for name, pattern in PATTERNS.items() if re.search(pattern, problem.solution[start:end])}
    assert seen == PATTERNS.keys()


def test_solutions_to_learn_from_are_right_and_some_break_off():
    rows = list(training_rows("train", 0, 200))
    held_out = list(training_rows("test", 0, 200, short=0))
    for row in rows + held_out:
        facts, target = facts_of(row["question"])
        assert final_number(row["answer"]) == solve(facts, target)
    written = [f"So {facts_of(row['question'])[1]}=" in row["answer"] for row in rows + held_out]
    assert all(written[200:])
    assert 10 < written[:200].count(False) < 50
    assert not {row["question"] for row in rows} & {row["question"] for row in held_out}


# --- Cases ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of a few thousand parameters that reads the problems' own tokens."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(list(training_rows("train", 0, 300)), 512)
    config = WarmupConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    torch.manual_seed(0)
    small_model(config, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "warmup.json").write_text(json.dumps({"held_out_accuracy": 0.25}))
    return folder


@pytest.fixture(scope="module")
def subject(folder):
    return Subject(str(folder))


def rows(subject, problems):
    texts = [f"{problem.solution}{subject.tokenizer.eos_token}" for problem in problems]
    asked = [(one.question, subject.tokenizer(text)["input_ids"]) for one, text in zip(problems, texts, strict=True)]
    return rows_of(asked, subject.tokenizer)


def cases_of(subject, problems):
    """Of each solution prompt, completion, lines, answer and end of the reasoning, in tokens."""
    some = rows(subject, problems)
    columns = zip(some.prompts, some.completions, lines_of(some, subject.tokenizer), strict=True)
    return [SimpleNamespace(prompt=prompt, completion=row, **one._asdict()) for prompt, row, one in columns]


def importances_of(subject, name, count=3, **options):
    """Cases, and a method's importances of their lines."""
    problems = list(itertools.islice(generate("test", 0), count))
    return cases_of(subject, problems), ask(name, [subject], rows(subject, problems), **options)


def plain_logprobs(subject, case, completion):
    """Of the tokens of a completion, (T, V), by one plain forward."""
    with torch.no_grad():
        rows = subject.model(input_ids=torch.cat([case.prompt, completion])[None]).logits[0].double().log_softmax(-1)
    return rows[len(case.prompt) - 1 : -1]


def answer_logprob(subject, case, masked=()):
    """With a placeholder in the place of some tokens."""
    completion = case.completion.clone()
    completion[list(masked)] = subject.tokenizer.pad_token_id
    rows = plain_logprobs(subject, case, completion)
    return sum(rows[t, completion[t]].item() for t in range(*case.answer))


def test_masked_lines_and_tokens_are_differences_of_plain_forwards(subject):
    for name in ("CF", "OAR-P, log-prob"):
        cases, values = importances_of(subject, name, 1)
        for case, row in zip(cases, values, strict=True):
            base = answer_logprob(subject, case)
            for unit, value in zip(case.spans, row, strict=True):
                masks = [range(*unit)] if name == "CF" else [[t] for t in range(*unit)]
                drops = [base - answer_logprob(subject, case, mask) for mask in masks]
                assert value == pytest.approx(statistics.fmean(drops), abs=1e-4)


def test_entropy_is_that_of_the_distribution_each_token_was_drawn_from(subject):
    (case,), (values,) = importances_of(subject, "entropy", 1)
    logp = plain_logprobs(subject, case, case.completion)
    entropy = -(logp.exp() * logp).sum(-1)
    expected = [entropy[unit.start : unit.end].mean().item() for unit in case.spans]
    assert values == pytest.approx(expected, abs=1e-4)
    (_, (values,)) = importances_of(subject, "entropy", 1, tokens=True)
    assert values == pytest.approx(entropy[: case.end].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("OAR-P")])
def test_every_method_gives_a_number_per_line_or_token_and_repeats_itself(subject, name):
    (cases, once), (_, again) = importances_of(subject, name, 2), importances_of(subject, name, 2)
    assert [len(row) for row in once] == [len(case.spans) for case in cases]
    assert once == again
    _, tokens = importances_of(subject, name, 2, tokens=True)
    assert [len(row) for row in tokens] == [case.end for case in cases]
    if name == "CF":
        assert [row[:: LENGTH + 1] for row in tokens] == once


def test_outcomes_of_an_answer_of_two_tokens_differ(subject):
    values = [importances_of(subject, f"OAR-P, {outcome}", 1)[1] for outcome in ("mean", "last", "log-prob")]
    assert all(one != other for one, other in itertools.combinations(values, 2))


# --- Truths that take sampling ----------------------------------------------------------------------------------


def test_step_advantages_are_changes_of_the_share_that_reaches_the_own_answer(subject, monkeypatch):
    problem = next(generate("test", 0, kinds=["wrong"]))
    (case,) = cases_of(subject, [problem])

    def continued(prompts, *, max_completion_length, keys, temperature):
        lengths = [len(prompt) - len(case.prompt) for prompt in prompts]
        assert len({*map(tuple, keys)}) == len(prompts)
        own = [length >= case.spans[0].end or i % 4 == 0 for i, length in enumerate(lengths)]
        texts = [f"#### {problem.answer if yes else problem.gold}" for yes in own]
        return SimpleNamespace(ids=lambda: [subject.tokenizer(text)["input_ids"] for text in texts])

    monkeypatch.setattr(subject, "engine", continued)
    (values,) = planted.step_advantages(subject, rows(subject, [problem]), [problem], PlantedSettings(samples=4))
    assert values == [0.75, *[0.0] * (len(case.spans) - 1)]


def test_a_token_is_critical_if_the_most_probable_other_one_leads_to_a_wrong_answer(subject, monkeypatch):
    """Here a chain goes wrong where a token at an even place of its last line is replaced."""
    problems, decode = list(itertools.islice(generate("test", 1), 2)), subject.tokenizer.decode
    cases = cases_of(subject, problems)
    whole = [case.completion.tolist() for case in cases]

    def decoded(prompts, *, max_completion_length, keys, temperature):
        assert keys is None  # greedy
        result, starts = [], [case.prompt.tolist() for case in cases]
        for row in prompts:
            b = next((b for b, prompt in enumerate(starts) if row[: len(prompt)] == prompt), None)
            if b is None or row == starts[b]:  # a greedy chain: the first two are right
                result.append(whole[b] if b is not None else subject.tokenizer("#### 1")["input_ids"])
                continue
            t = len(row) - len(cases[b].prompt) - 1
            logp = plain_logprobs(subject, cases[b], torch.tensor(whole[b][: t + 1]))[t]
            logp[[whole[b][t], subject.tokenizer.eos_token_id]] = -torch.inf
            assert row[-1 - t : -1] == whole[b][:t]
            assert logp[row[-1]] > logp.max() - 1e-4
            answer = problems[b].gold + (t >= cases[b].spans[-1].start and t % 2 == 0)
            result.append(subject.tokenizer(f"\n#### {answer}")["input_ids"])
        return SimpleNamespace(ids=lambda: result)

    monkeypatch.setattr(subject, "engine", decoded)
    chains = planted.right_chains(subject, PlantedSettings(chains=2))
    for chain, problem, case in zip(chains, problems, cases, strict=True):
        assert chain["question"] == problem.question
        assert decode(chain["completion"]) == f"{problem.solution}{subject.tokenizer.eos_token}"
        last = case.spans[-1].start
        assert chain["critical"] == [t >= last and t % 2 == 0 for t in range(case.end)]


# --- Judges -----------------------------------------------------------------------------------------------------


def test_a_rule_by_position_alone_has_a_position_free_auroc_of_one_half():
    rng = random.Random(0)
    truths = [[rng.random() < (k + 1) / 8 for k in range(7)] for _ in range(20)]  # what matters comes late
    rows = [[float(k) for k in range(7)] for _ in truths]
    for sign in (1, -1):
        result = agreement([[sign * x for x in row] for row in rows], truths, draws=50)
        assert result["auroc"] == {"value": 0.5, "low": 0.5, "high": 0.5}
        assert sign * result["spearman"]["value"] > 0.2
        assert result["p"] < 0.01
    perfect = agreement(truths, truths, draws=50)
    assert [perfect[name]["value"] for name in ("auroc", "spearman", "recall", "first")] == pytest.approx([1.0] * 4)


def test_equal_scores_win_half_a_pair_and_come_first_equally_often():
    scores, truth = np.array([2.0, 2.0, 1.0, 3.0]), np.array([False, True, True, False])
    assert AUROC["auroc"][0](scores, truth) == (0.5, 2, 0.0, 2)
    assert recall_curve(scores, truth).tolist() == [0, 0.25, 0.5, 1]
    measure, _ = recall_at(50)
    assert measure(scores, truth) == 0.25
    assert agreement([scores], [truth])["auroc"] is None  # one problem has no interval


def test_a_method_without_ranks_has_correlation_zero_and_constant_truths_are_left_out():
    truths = [[0.0, 1.0], [0.3, 0.3], [0.0, 1.0]]
    result = agreement([[1.0, 1.0], [1.0, 2.0], [0.0, 5.0]], truths, SPEARMAN, draws=20)
    assert result["spearman"]["value"] == pytest.approx(0.5)
    assert result["problems"] == 2
    assert agreement([[1.0, 2.0]], [[0.5, 0.5]]) == {"problems": 0}


@pytest.mark.parametrize("truth", ["direct", "total"])
def test_random_scores_of_planted_truths_have_expectation_one_half_and_honest_intervals(truth):
    """Of 100 draws 95 % of the bootstrap intervals hold 0.5; one draw only may well miss it, as 0.45 did."""
    problems = list(itertools.islice(generate("test", 0), 120))
    truths = [np.array([getattr(unit, truth) for unit in problem.units]) for problem in problems]
    rng, result = np.random.default_rng(1), []
    for _ in range(100):
        pairs = [AUROC["auroc"][0](rng.random(len(row)), row) for row in truths]
        result.append(bootstrap_interval(AUROC["auroc"][1], pairs, draws=120))
    spread = statistics.stdev(one.value for one in result)
    assert abs(statistics.fmean(one.value for one in result) - 0.5) < 3 * spread / len(result) ** 0.5
    assert 0.9 <= statistics.fmean(one.low <= 0.5 <= one.high for one in result) <= 0.99
    # What is reported in their place: the mean of many draws, and where 95 % of them fall.
    reported = agreement(None, truths, AUROC)["auroc"]
    assert abs(reported["value"] - 0.5) < 0.01
    assert reported["high"] - reported["low"] == pytest.approx(4 * spread, rel=0.25)


# --- Runs -------------------------------------------------------------------------------------------------------


def test_pieces_are_done_once_and_refused_under_another_commit_or_other_settings(tmp_path):
    head, calls = {"environment": {"commit": "abc"}}, []
    for _ in range(2):
        pieces = Pieces(tmp_path, {"draws": 3}, head)
        assert pieces.get("a, 1", lambda: calls.append(1) or {"x": (1, 2)}) == {"x": [1, 2]}
    assert len(calls) == 1
    for settings, commit in (({"draws": 4}, "abc"), ({"draws": 3}, "def")):
        with pytest.raises(ValueError, match="name another --folder"):
            Pieces(tmp_path, settings, {"environment": {"commit": commit}})


def test_planted_writes_its_tables_and_a_second_run_asks_nothing_again(subject, folder, tmp_path, monkeypatch, capsys):
    command = ["planted", "--folder", str(tmp_path), "--results", str(tmp_path), "--model", str(folder)]
    command += ["--problems", "8", "--costly", "4", "--samples", "1", "--chains", "1", "--room", "4", "--draws", "5"]
    command += ["--commit", "none"]
    monkeypatch.setattr(planted, "METHODS", {name: METHODS[name] for name in ("position", "CF")})
    problem = next(generate("test", 1))
    chain = {"question": problem.question, "completion": rows(subject, [problem]).completions[0].tolist()}
    chain["critical"] = [t % 3 == 0 for t in range((LENGTH + 1) * len(problem.units))]
    monkeypatch.setattr(planted, "right_chains", lambda *_: [chain, chain])
    assert main(command) == 0
    first = json.loads((tmp_path / "evidence-planted.json").read_text())
    trained = first["models"]["trained"]
    assert (trained["accuracy"], trained["chains"]) == (0.25, 2)
    assert list(trained["methods"]) == ["random", planted.SAMPLED, "position", "CF"]
    assert trained["methods"]["position"]["total"]["auroc"]["value"] == 0.5
    assert trained["methods"]["position"]["tokens"]["recall"]["value"] == pytest.approx(1 / 3, abs=0.02)
    assert (tmp_path / "evidence-planted.md").read_text().count("| CF |") == 4 + 3

    def asked_again(*_, **__):
        raise AssertionError("this is known already")

    for name in ("ask", "step_advantages", "right_chains"):
        monkeypatch.setattr(planted, name, asked_again)
    assert main(command) == 0
    assert json.loads((tmp_path / "evidence-planted.json").read_text())["models"] == first["models"]
    assert main([*command, "--samples", "0"]) == 1
    assert "samples must be an integer, at least 1" in capsys.readouterr().err
