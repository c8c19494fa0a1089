"""Evidence on a model of one's own: problems and examples, gains by continuations, drops by hand, runs that resume."""

import functools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.research import agreement, continuations, drops
from benchmarks.research.command import main
from benchmarks.research.continuations import Case, cases_of, continued, fed, gains, judged, places
from benchmarks.research.models import Problem, Subject, read_problems, require_mixed
from cfa_kernels import Span
from cfa_kernels.text.find import Reasoning, find_reasoning
from trainer.analyze.tables import Estimate
from trainer.settings import ASSETS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def subject():
    return Subject(str(ASSETS), max_tokens=40)


def written(path, *answers):
    lines = [json.dumps({"question": f"Question {i}?", "answer": answer}) for i, answer in enumerate(answers)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_examples_are_turns_before_the_question_and_are_not_asked(subject, tmp_path):
    file = written(tmp_path / "a.jsonl", "2+3=<<2+3=5>>5, and more words.\n#### 5", "1+1=<<1+1=2>>2\n#### 2",
                   "#### 7", "<<1+1=2>>2, <<2+2=4>>4\n#### 4", "9-1=<<9-1=8>>8, it is so.\n#### 1,008")  # fmt: skip
    other = written(tmp_path / "b.jsonl", "3*3=<<3*3=9>>9\n#### 9")
    problems, held_out = read_problems(subject.tokenizer, file, other, examples=1, computations=1)
    assert [(problem.question, problem.answer) for problem in problems] == [
        ("Question 0?", "5"),
        ("Question 4?", "1,008"),
    ]
    assert [problem.answer for problem in held_out] == ["9"]
    text = subject.tokenizer.decode(problems[0].prompt)
    places = [text.index(part) for part in ("Question 1?", "1+1=2\n#### 2", "Question 0?")]
    assert places == sorted(places)
    assert "<<" not in text
    assert text.count("#### <number>") == 2
    assert len(read_problems(subject.tokenizer, file)[0]) == 5
    assert subject.reward(torch.tensor(subject.tokenizer("So it is #### 1008")["input_ids"]), problems[1]) == 1


def test_what_cannot_be_asked_is_refused_by_name(subject, tmp_path):
    file = written(tmp_path / "a.jsonl", "1+1=<<1+1=2>>2\n#### 2", "none")
    with pytest.raises(ValueError, match=r"a\.jsonl, row 1: no number can be read from 'answer': 'none'"):
        read_problems(subject.tokenizer, file)
    file = written(tmp_path / "a.jsonl", "1+1=<<1+1=2>>2\n#### 2", "#### 3")
    with pytest.raises(ValueError, match=r"1 of its 2 rows can be asked \(computations=1\), and 1 are examples; name"):
        read_problems(subject.tokenizer, file, examples=1, computations=1)
    known = {"chat_template": "{}", "eos_token": "<end>", "name_or_path": "some/folder"}
    for name, meaning in (("chat_template", "chat template"), ("eos_token", "end-of-text token")):
        with pytest.raises(
            ValueError, match=f"model some/folder: its tokenizer has no {meaning}, so it cannot be asked"
        ):
            read_problems(SimpleNamespace(**known | {name: None}), file)
    for value, advice in ((0.0, "ask easier ones"), (1.0, "ask harder ones")):
        said = f"{value:.0%} of 8 completions of 2 problems are right, .* nothing to learn; {advice}"
        with pytest.raises(ValueError, match=said):
            require_mixed(torch.full((2, 4), value))
    assert require_mixed(torch.tensor([[0.0, 1.0], [1.0, 1.0]])) == {"right": 0.75, "mixed": 0.5}


SOLUTIONS = "2+3=5\nNow 5*4=20\nSo 20-1=19\n#### 19", "2+3=6\nNow 6*4=24\nSo 24-1=23\n#### 23"


def rolled(subject, *problems, ended=True):
    """A right and a wrong completion of each problem."""
    ids = [subject.tokenizer(text)["input_ids"] for text in SOLUTIONS]
    return [
        {"problem": i, "ids": ids[k], "ended": ended, "reward": float(not k)} for i in problems for k in range(len(ids))
    ]


def cases(subject, count=2):
    problems = [Problem(subject.tokenizer(f"Question {i}?")["input_ids"], "19") for i in range(3)]
    return cases_of(rolled(subject, 0, 2), problems, subject.tokenizer, count)


def test_cases_are_right_and_wrong_ones_in_turn_of_problems_that_have_both(subject):
    some = cases(subject)
    assert [(case.number, case.right) for case in some] == [(0, True), (1, False), (2, True), (3, False)]
    assert len(cases(subject, 1)) == 2
    for broken in (rolled(subject, 0, ended=False), rolled(subject, 0)[:1]):
        with pytest.raises(ValueError, match=r"asked: of \d completions .* ask more problems, or raise max_tokens"):
            cases_of(broken, [some[0].problem], subject.tokenizer, 1)
    for case in some:
        texts = [subject.tokenizer.decode(case.completion[slice(*edge)]) for edge in case.edges]
        assert "".join(texts).replace("\n", "").startswith(SOLUTIONS[not case.right][:5])
        assert all(any(map(str.isdigit, text)) for text in texts)


def test_a_gain_is_the_change_of_the_share_of_continuations_that_give_the_number(subject, monkeypatch):
    (case, _), asked = cases(subject, 1), []
    count, cuts = 4, sorted({cut for edge in case.edges for cut in edge})

    def completed(prompts, begun):
        """Of the continuations of a beginning, the first few give 19: as many as cuts lie before it."""
        asked.extend(zip(prompts, begun, strict=True))
        rows = []
        for n, row in enumerate(begun):
            right = n % count < min(cuts.index(len(row)), count)
            rows.append(torch.tensor([*row.tolist(), *subject.tokenizer(f"\n#### {19 if right else 4}")["input_ids"]]))
        return rows

    monkeypatch.setattr(subject, "completed", completed)
    (answers,) = continued(subject, [case], count, seed=0)
    assert len(asked) == count * len(cuts)
    assert all(prompt == case.problem.prompt and torch.equal(row, case.completion[: len(row)]) for prompt, row in asked)
    shares = {cut: min(k, count) / count for k, cut in enumerate(cuts)}
    expected = [shares[after] - shares[before] for before, after in case.edges]
    assert gains(case, answers, "19").mean(1).tolist() == expected
    assert gains(case, answers, "4").mean(1).tolist() == [-one for one in expected]
    result = continuations.summed(
        subject, [case], [answers], {name: [{"values": expected}] for name in continuations.METHODS}
    )
    assert result["right"]["places"]["right answer"] == places([expected])
    assert result["wrong"]["completions"] == 0


def test_words_between_spans_belong_to_none_of_them(subject):
    ids = torch.tensor(subject.tokenizer("1+1=2\nIt goes on: 2+2=4\n#### 4")["input_ids"])
    spans = find_reasoning({0: ids}, subject.tokenizer)[0].spans
    first, *_, last = continuations._edges(ids, spans, subject.tokenizer)
    assert first == tuple(spans[0])
    assert last[1] == spans[-1].end
    two = [Span(0, 2), Span(4, 6)]
    for text, before in ((" \n", 2), (" a", 4)):
        row = torch.tensor([*ids[:2].tolist(), *subject.tokenizer(text)["input_ids"][:2], *ids[:2].tolist()])
        while len(row) < 6:
            row = torch.cat([row[:3], row[2:]])
        assert continuations._edges(row, two, subject.tokenizer)[1] == (before, 6)


def test_by_the_reference_answer_a_wrong_completion_is_judged_by_what_would_be_right(subject):
    right, wrong = cases(subject, 1)
    own, other = (
        [
            torch.tensor(one["values"])
            for one in judged(subject, name, [right, wrong], lambda: fed(subject, [right, wrong]))
        ]
        for name in ("prefix gain", continuations.REFERENCE)
    )
    assert torch.equal(own[0], other[0])
    assert not torch.equal(own[1], other[1])
    ids = subject.tokenizer(SOLUTIONS[1].replace("#### 23", "#### 19"))["input_ids"]
    reasoning = find_reasoning({0: ids}, subject.tokenizer)[0]
    swapped = Case(0, wrong.problem, torch.tensor(ids), reasoning, False, [])
    torch.testing.assert_close(
        torch.tensor(judged(subject, "prefix gain", [swapped], lambda: fed(subject, [swapped]))[0]["values"]), other[1]
    )


def test_places_share_out_what_is_positive():
    shares = places([[1.0, -2.0, 3.0], [0.0, 0.0], [2.0, 0.0, 0.0]])
    assert shares == {"last": pytest.approx(0.375), "last but one": 0.0, "earlier": pytest.approx(0.625)}
    assert places([[0.0, -1.0]]) == {}


def test_drops_are_cut_at_multiples_of_their_mean():
    texts = ["Let x be it.", "So 2*3=6=6", "Step 1: go", "2+2=4"]
    one = {"right": True, "spans": [(0, 2), (2, 6), (6, 8), (8, 10)], "texts": texts, "drop": [0.0, 7.9, -0.1, 0.2],
           "weights": [0.5] * 2 + [4.0] * 4 + [0.5] * 2 + [1.0] * 2, "end": 12}  # fmt: skip
    result = drops.tabulated([one, one | {"right": False, "drop": [0.0, 7.9, 0.1, 0.0]}])
    figures = result["figures"]
    assert (result["completions"], result["spans"], result["right"], result["mean"]) == (2, 8, 1, 2.0)
    assert [figures[name] for name in drops.TIERS] == [0.25, 0.0, 0.0, 0.25, 0.375, 0.125]
    assert figures["of them in wrong completions"] == 0
    assert (figures["set-up"], figures["conclusion"], figures["calculation chain"]) == (0.0, None, None)
    assert figures["early"]["value"] == 0
    assert figures["middle"]["value"] == pytest.approx(15.8 / 4 / 2)
    assert figures["largest weight"] == 0.4
    assert figures["high"] == 0.4
    assert figures["their gradient"] == pytest.approx(16 / 20)
    assert set(figures) == set(drops.PAPER)
    assert "| largest weight | 0.4 | 0.218 |" in drops.markdown(result)
    assert all(name in drops.PAPER for name in (*drops.PATTERNS, *drops.TIERS))


@pytest.mark.parametrize(
    ("text", "found"),
    [("1. Add them.", True), ("12) Add", True), ("Step 3", True), ("7.5 * 2 = 15", False), (" $36.50 / 6", False)],
)
def test_a_number_with_decimals_is_no_step_header(text, found):
    assert bool(re.search(drops.PATTERNS["step header"], text)) == found


def test_the_command_writes_its_tables_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(continuations, "summed", functools.partial(continuations.summed, draws=20))
    known = lambda figure, rows, draws: Estimate(float(figure(rows)), 0.0, 1.0)  # noqa: E731 (others test intervals)
    monkeypatch.setattr(agreement, "bootstrap_interval", known)
    arguments = ["pretrained", "--folder", str(tmp_path), "--results", str(tmp_path), "--commit", "none"]
    arguments += ["--asked", "5", "--evaluated", "2", "--max-tokens", "70", "--group", "6", "--at-once", "4"]
    arguments += ["--continuations", "2", "--credited", "12", "--costly", "2", "--judged"]
    assert main([*arguments, "3"]) == 0
    first = json.loads((tmp_path / "evidence-pretrained.json").read_text())
    assert first["policy"]["completions"] == 30
    assert first["truth"]["right"]["completions"] == first["truth"]["wrong"]["completions"] > 1
    assert first["sampled on"]["name"] == first["scored on"]["name"] == first["environment"]["device"]["name"]
    assert first["drops"]["completions"] <= 12
    for kind in ("right", "wrong"):
        few, all_of_them = (
            first["truth"][kind]["methods"][name]["right answer, spearman"][1] for name in ("OAR-P", "CF")
        )
        assert few <= 1 < all_of_them
    assert first["work"]["OAR-P"]["tokens"] > first["work"]["CF"]["tokens"] > 0
    text = (tmp_path / "evidence-pretrained.md").read_text()
    assert re.search(r"\| prefix gain, reference answer \| -?\d", text)
    for name in ("completed", "answered"):
        monkeypatch.setattr(Subject, name, None)  # all is known by now
    monkeypatch.setattr(continuations, "judge", None)
    assert main([*arguments, "3"]) == 0
    assert json.loads((tmp_path / "evidence-pretrained.json").read_text())["truth"] == first["truth"]
    assert main([*arguments, "3", "--costly", "0", "--scored-in", "float32"]) == 0
    other = json.loads((tmp_path / "evidence-pretrained.json").read_text())
    some, all_of_them = (one["truth"]["right"]["methods"].keys() for one in (other, first))
    assert some == all_of_them - {*continuations.COSTLY}
    assert other["truth"]["wrong"]["methods"]["CF"] == first["truth"]["wrong"]["methods"]["CF"]
    assert main([*arguments, "3", "--asked", "13"]) == 1
    assert "holds pieces of" in capsys.readouterr().err
    assert np.isfinite(first["drops"]["mean"])


def test_reasoning_of_a_case_ends_before_its_marker(subject):
    case = cases(subject)[0]
    assert isinstance(case.reasoning, Reasoning)
    assert all(after <= case.reasoning.end for _, after in case.edges)
