"""Problems of a file as a model is asked them, and pieces of work that are kept."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.results import Pieces
from benchmarks.research.models import Subject, read_problems, require_mixed
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
    problems = read_problems(subject.tokenizer, file, examples=1, computations=1)
    assert [problem.answer for problem in problems] == ["5", "1,008"]
    text = subject.tokenizer.decode(problems[0].prompt)
    places = [text.index(part) for part in ("Question 1?", "1+1=2\n#### 2", "Question 0?")]
    assert places == sorted(places)
    assert "<<" not in text
    assert text.count("#### <number>") == 2
    assert len(read_problems(subject.tokenizer, file)) == 5
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


def test_pieces_are_done_once_and_refused_under_another_commit_or_other_settings(tmp_path):
    head, calls = {"environment": {"commit": "abc"}}, []
    for _ in range(2):
        pieces = Pieces(tmp_path, {"draws": 3}, head)
        assert pieces.get("a, 1", lambda: calls.append(1) or {"x": (1, 2)}) == {"x": [1, 2]}
    assert len(calls) == 1
    for settings, commit in (({"draws": 4}, "abc"), ({"draws": 3}, "def")):
        with pytest.raises(ValueError, match="name another --folder"):
            Pieces(tmp_path, settings, {"environment": {"commit": commit}})
