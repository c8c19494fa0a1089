"""Problems: what the generator writes, what is held out, and what is said about a bad row."""

import itertools
import json
import random
import re
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from trainer.config import DataConfig, TrainConfig
from trainer.data import Row, encode_prompts, load_rows, train_and_eval_rows
from trainer.embedded.problems import generate
from trainer.rewards.numbers import gold_number

GOOD = {"question": "How many?", "answer": "2+3=5\n#### 5"}


def problems(split: str, count: int, seed: int = 0, **options):
    return list(itertools.islice(generate(split, seed, **options), count))


def arithmetic(problem) -> tuple:
    return tuple((step.left, step.op, step.right) for step in problem.steps)


def test_generated_solutions_are_right_and_their_numbers_come_from_the_question_or_an_earlier_step() -> None:
    for problem in problems("train", 500):
        known = {int(number) for number in re.findall(r"\d+", problem.question)}
        known |= {2, 3, 4}  # "twice", "three times", "four times"
        for left, op, right, result in re.findall(r"(\d+)([-+*/])(\d+)=(\d+) ", problem.solution()):
            assert eval(f"{left}{op}{right}") == int(result) > 0
            assert {int(left), int(right)} <= known
            known.add(int(result))
        assert gold_number(problem.solution()) == problem.answer == int(result)
        assert 2 <= len(problem.steps) <= 4


def test_annotated_solutions_follow_gsm8k() -> None:
    problem = problems("train", 1)[0]
    assert re.sub(r"<<.*?>>", "", problem.solution(annotate=True)) == problem.solution()
    assert len(re.findall(r"<<\d+[-+*/]\d+=\d+>>\d", problem.solution(annotate=True))) == len(problem.steps)


def test_idle_facts_are_in_the_question_and_no_step_needs_them() -> None:
    sample = problems("train", 500)
    assert {len(problem.idle) for problem in sample} == {0, 1, 2}
    for problem in sample:
        for fact in problem.idle:
            assert fact.sentence in problem.question
            assert str(fact.number) in fact.sentence
    assert not any(problem.idle for problem in problems("train", 50, distractors=0))


def test_a_careless_solution_takes_its_last_number_from_an_idle_fact_now_and_then() -> None:
    rng, slips = random.Random(0), 0
    for problem in problems("train", 2000):
        careless = problem.careless_solution(rng)
        if careless != problem.solution():
            slips += 1
            last = re.findall(r"[-+](\d+)=", careless)[-1]
            assert int(last) in {fact.number for fact in problem.idle}
    assert 500 < slips < 900


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert problems("train", 50, seed=3) == problems("train", 50, seed=3)
    assert problems("train", 50, seed=3) != problems("train", 50, seed=4)


def test_held_out_problems_share_no_arithmetic_with_training_problems_of_any_seed() -> None:
    held_out = {arithmetic(problem) for problem in problems("test", 1000, seed=1)}
    for seed in range(4):
        assert held_out.isdisjoint(arithmetic(problem) for problem in problems("train", 3000, seed=seed))


def test_the_check_for_shared_arithmetic_can_fail() -> None:
    held_out = {arithmetic(problem) for problem in problems("test", 1000, seed=1)}
    assert not held_out.isdisjoint(arithmetic(problem) for problem in problems("test", 3000, seed=2))


def test_an_unknown_split_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"split must be one of .*got 'validation'"):
        next(generate("validation", 0))


def write(path, rows) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_a_file_keep_their_order_and_further_columns(tmp_path, suffix) -> None:
    rows = [{"question": f"Problem {i}?", "answer": f"#### {i}", "level": i % 3} for i in range(5)]
    assert load_rows(write(tmp_path / f"data{suffix}", rows), split="train") == rows
    assert load_rows(str(tmp_path / f"data{suffix}"), split="train", count=2) == rows[:2]


def test_columns_can_be_named_and_bare_numbers_are_answers(tmp_path) -> None:
    name = write(tmp_path / "data.jsonl", [{"problem": "How many?", "result": 5}])
    rows = load_rows(name, split="train", question_column="problem", answer_column="result")
    assert rows == [{"question": "How many?", "answer": "5"}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"question": None, "answer": "#### 5"}, "column 'question' must be text, got None"),
        ({"question": "How many?", "answer": None}, "column 'answer' must be text, got None"),
        ({"question": "  \n", "answer": "#### 5"}, "column 'question' is empty"),
        ({"question": "How many?", "answer": ""}, "column 'answer' is empty"),
        ({"question": "How many?", "answer": "five\n#### five"}, "no number can be read from column 'answer'"),
    ],
)
def test_a_bad_row_is_named_with_its_number_and_reason(tmp_path, suffix, bad, reason) -> None:
    name = write(tmp_path / f"data{suffix}", [GOOD, GOOD, bad, GOOD])
    with pytest.raises(ValueError, match=f"row 2: {reason}"):
        load_rows(name, split="train")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"question": "How many?"}, r"row 1: has no column 'answer'; its columns are \['question'\]"),
        ('{"question": "How', "row 1: is not JSON"),
        ("[1, 2]", "row 1: expected an object with named columns, got list"),
        ({"question": ["How", "many?"], "answer": "5"}, "row 1: column 'question' must be text"),
    ],
)
def test_a_malformed_line_is_named_with_its_number_and_reason(tmp_path, bad, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        load_rows(write(tmp_path / "data.jsonl", [GOOD, bad]), split="train")


@pytest.mark.parametrize("file", ["data.csv", "data.json"])
def test_a_file_of_another_kind_is_an_error(tmp_path, file) -> None:
    with pytest.raises(ValueError, match=r"expected a \.jsonl or \.parquet file"):
        load_rows(str(tmp_path / file), split="train")


def test_a_file_without_rows_is_an_error(tmp_path) -> None:
    with pytest.raises(ValueError, match="has no rows"):
        load_rows(write(tmp_path / "data.jsonl", []), split="train")


def test_a_file_without_an_evaluation_set_gives_some_rows_up_for_one(tmp_path) -> None:
    rows = [{"question": f"Problem {i % 90}?", "answer": f"#### {i}"} for i in range(100)]  # ten questions twice
    config = DataConfig(dataset=write(tmp_path / "data.jsonl", rows), eval_problems=20)
    train, test = train_and_eval_rows(config)
    assert len(test) == 20
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    assert {row["question"] for row in train + test} == {row["question"] for row in rows}
    assert train_and_eval_rows(config, seed=5) == (train, test)


def test_a_file_smaller_than_its_evaluation_set_is_an_error(tmp_path) -> None:
    config = DataConfig(dataset=write(tmp_path / "data.jsonl", [GOOD] * 3), eval_problems=3)
    with pytest.raises(ValueError, match="eval_problems: cannot set 3 of 3 rows"):
        train_and_eval_rows(config)


def test_training_on_nothing_but_the_evaluation_set_is_an_error(tmp_path) -> None:
    name = write(tmp_path / "data.jsonl", [GOOD])
    with pytest.raises(ValueError, match="every training problem is also held out"):
        train_and_eval_rows(DataConfig(dataset=name, eval_dataset=name))


class Hub:
    """Stands in for the datasets library: one data set with the given configurations."""

    def __init__(self, configs) -> None:
        self.configs, self.calls = configs, []

    def get_dataset_config_names(self, name):
        return self.configs

    def load_dataset(self, name, config, split):
        self.calls.append((name, config, split))
        return SimpleNamespace(to_list=lambda: [GOOD | {"question": f"{split} problem?"}])


@pytest.mark.parametrize(("configs", "chosen"), [(["default"], "default"), (["main", "socratic"], "main")])
def test_the_paper_data_set_needs_no_configuration_and_is_tested_on_its_own_test_split(monkeypatch, configs, chosen):
    hub = Hub(configs)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    train, test = train_and_eval_rows(DataConfig(dataset="openai/gsm8k"))
    assert hub.calls == [("openai/gsm8k", chosen, "train"), ("openai/gsm8k", chosen, "test")]
    assert (train[0]["question"], test[0]["question"]) == ("train problem?", "test problem?")


def test_a_hub_data_set_with_several_configurations_asks_which(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Hub(["easy", "hard"]))
    with pytest.raises(ValueError, match=r"choose dataset_config from \['easy', 'hard'\]"):
        train_and_eval_rows(DataConfig(dataset="somebody/problems"))


def test_a_hub_data_set_that_cannot_be_read_is_named_with_its_split_in_one_line(monkeypatch) -> None:
    class Unfinished(Exception):
        pass

    class Broken(Hub):
        def load_dataset(self, name, config, split):
            raise Unfinished("a file is cut short\nand so on")

    monkeypatch.setitem(sys.modules, "datasets", Broken(["main"]))
    said = r"^dataset somebody/problems: split 'train' cannot be read from the hub: Unfinished: a file is cut short$"
    with pytest.raises(ValueError, match=said):
        train_and_eval_rows(DataConfig(dataset="somebody/problems"))


class WordTokenizer:
    """One id per word; with or without a chat template."""

    def __init__(self, chat_template=None) -> None:
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens=True):
        self.text = text
        return {"input_ids": ([1] if add_special_tokens else []) + [2] * len(text.split())}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, enable_thinking):
        assert (tokenize, add_generation_prompt, enable_thinking) == (False, True, False)
        return f"<user> {messages[0]['content']} <assistant>"


def test_prompts_follow_the_chat_template_if_there_is_one() -> None:
    config = TrainConfig(instruction="Think.")
    chat, plain = WordTokenizer("template"), WordTokenizer()
    assert encode_prompts([GOOD], chat, config, 1024) == [[2] * 5]
    assert chat.text == "<user> How many?\nThink. <assistant>"
    assert encode_prompts([GOOD], plain, config, 1024) == [[1] + [2] * 5]
    assert plain.text == "Question: How many?\nThink.\nAnswer:"


@pytest.mark.parametrize(("limit", "context"), [(6, 1024), (None, 518)])
def test_a_prompt_that_does_not_fit_is_named_with_its_data_set_and_its_row_of_the_file(
    tmp_path, limit, context
) -> None:
    long = GOOD | {"question": "How many is far too many for this one?"}
    name = write(tmp_path / "data.jsonl", [GOOD | {"question": f"How {i}?"} for i in range(9)] + [long])
    config = TrainConfig(
        dataset=name, eval_problems=3, instruction="", max_prompt_length=limit, max_completion_length=512
    )
    train, test = train_and_eval_rows(config)  # shuffled
    with pytest.raises(ValueError, match=rf"^dataset {name}, row 9: the prompt has 12 tokens, at most 6 fit"):
        encode_prompts(train + test, WordTokenizer(), config, context)


@pytest.mark.parametrize("context", [512, 100])
def test_a_context_that_completions_fill_is_said_without_counting_what_fits(context) -> None:
    with pytest.raises(ValueError, match=rf"^max_completion_length 512 leaves no place .* at most {context - 1}, less"):
        encode_prompts([Row(GOOD)], WordTokenizer(), TrainConfig(instruction=""), context)
