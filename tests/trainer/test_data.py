"""Problems: what the generator writes, what is held out, and what is said about a bad row."""

import datetime
import json
import re

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from tests.support.tiny import jsonl
from trainer import data
from trainer.config import TrainConfig
from trainer.data import Row, encode_prompts, load_rows, stop_clock, take_examples, train_and_eval_rows
from trainer.settings import ASSETS, TrainSettings

GOOD = {"question": "How many?", "answer": "2+3=5\n#### 5"}


def write(path, rows) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(jsonl(*rows) if path.suffix == ".jsonl" else json.dumps(rows), "utf-8")
    return str(path)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_rows_of_a_file_keep_their_order_and_further_columns(tmp_path, suffix) -> None:
    rows = [{"question": f"Problem {i}?", "answer": f"#### {i}", "level": i % 3} for i in range(5)]
    assert load_rows(write(tmp_path / f"data{suffix}", rows), split="train") == rows
    assert load_rows(str(tmp_path / f"data{suffix}"), split="train", count=2) == rows[:2]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]


def test_prompts_in_chat_format_and_answers_inside_a_column_are_read_as_dapo_math_has_them(tmp_path) -> None:
    row = {"prompt": CHAT, "reward_model": {"ground_truth": 5, "style": "rule"}, "ability": "MATH"}
    name = write(tmp_path / "data.parquet", [row])
    columns = TrainSettings(question_column="prompt", answer_column="reward_model.ground_truth")
    (read,) = load_rows(name, split="train", columns=columns)
    assert read == {"question": "How many?", "answer": "5", "reward_model": row["reward_model"], "ability": "MATH"}
    assert read.messages == CHAT


def test_a_configuration_and_splits_of_a_hub_data_set_are_found(monkeypatch) -> None:
    rows = datasets.Dataset.from_list([GOOD | {"question": f"{i}?"} for i in range(9)])
    hub = {"main": {"train": rows, "test": rows.select([0, 1])}, "only": {"train": rows}}
    asked = []

    def load(name: str, config: str = "only"):
        asked.append(config)
        if name == "owner/sums" and config == "main":
            raise ValueError("BuilderConfig 'main' not found")
        return hub[config]

    monkeypatch.setattr(datasets, "load_dataset", load)
    train, test = train_and_eval_rows(TrainSettings(dataset="owner/gsm8k"))
    assert (len(train), len(test), {*asked}) == (7, 2, {"main"})
    train, test = train_and_eval_rows(TrainSettings(dataset="owner/sums", eval_problems=3))  # has no split for a test
    assert (len(train), len(test), asked[-2:]) == (6, 3, ["main", "only"])
    with pytest.raises(ValueError, match=r"dataset owner/sums: has no split 'test', only \['train'\]"):
        train_and_eval_rows(TrainSettings(dataset="owner/sums", eval_dataset="owner/sums"))
    with pytest.raises(ValueError, match=r"dataset owner/sums: cannot be read: .*main"):
        train_and_eval_rows(TrainSettings(dataset="owner/sums", dataset_config="main"))


FORM = "row 1: the last message of 'question' must be the user's"
# Columns of the second row, and words of the message.
BAD_ROWS: list[tuple[dict, str]] = [
    ({"question": None}, "row 1: the question must be text that is not empty, got None"),
    ({"question": " \n"}, "row 1: the question must be text that is not empty"),
    ({"answer": {"value": 5}}, "row 1: the answer must be text"),
    ({"answer": "five"}, "row 1: no number can be read from 'answer': 'five'"),
    ({"question": []}, FORM),
    ({"question": [CHAT[1], {"role": "assistant", "content": "5"}]}, FORM),
    ({"question": ["How many?"]}, FORM),
    ({"question": [{"role": "user", "content": [{"text": "a"}]}]}, "row 1: the question must be text"),
]


def test_a_bad_row_is_named_with_its_number_and_reason(monkeypatch) -> None:
    for row, said in BAD_ROWS:
        monkeypatch.setattr(data, "_load", lambda *_, row=row: [GOOD, GOOD | row])
        with pytest.raises(ValueError, match=re.escape(said)):
            load_rows("data.jsonl", split="train")
    for gold in ({"other": "5"}, "5"):
        monkeypatch.setattr(data, "_load", lambda *_, gold=gold: [{"question": "How many?", "gold": gold}])
        with pytest.raises(ValueError, match=r"row 0: has no column 'gold.truth', only \['gold'\]"):
            load_rows("data.jsonl", split="train", columns=TrainSettings(answer_column="gold.truth"))


def test_a_file_without_an_evaluation_set_gives_some_rows_up_for_one(tmp_path) -> None:
    rows = [{"question": f"Problem {i % 90}?", "answer": f"#### {i}"} for i in range(100)]  # ten questions twice
    config = TrainSettings(dataset=write(tmp_path / "data.jsonl", rows), eval_problems=20)
    train, test = train_and_eval_rows(config)
    assert len(test) == 20
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    assert {row["question"] for row in train + test} == {row["question"] for row in rows}
    fewer = train_and_eval_rows(TrainSettings(dataset=config.dataset, eval_problems=20, train_problems=30))
    assert fewer == (train[:30], test)


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([GOOD] * 3, {"eval_problems": 3}, "eval_problems: cannot set 3 of 3 rows"),
        ([GOOD], {"eval_dataset": "data.jsonl"}, "every training problem is also held out"),
    ],
)
def test_a_file_that_leaves_nothing_to_train_on_is_an_error(tmp_path, monkeypatch, rows, options, said) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data.jsonl", rows)
    with pytest.raises(ValueError, match=said):
        train_and_eval_rows(TrainSettings(dataset="data.jsonl", **options))


def tokenizer_with(template: str | None):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    tokenizer.chat_template = template
    return tokenizer


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}{{ '<think>' if enable_thinking else '' }}"
)


@pytest.mark.parametrize(
    ("options", "row", "text"),
    [
        ({"instruction": "Think."}, Row(GOOD), "<user> How many?\nThink. "),
        ({}, Row(GOOD, messages=CHAT), "<system> Be brief. <user> How many? "),
        ({"instruction": "Go."}, Row(GOOD, messages=CHAT), "<system> Be brief. <user> How many?\nGo. "),
        (
            {"system_prompt": "Think.", "instruction": "", "enable_thinking": True},
            Row(GOOD),
            "<system> Think. <user> How many? <think>",
        ),
    ],
)
def test_a_system_prompt_and_thinking_are_settings_and_messages_keep_what_they_say(options, row, text) -> None:
    tokenizer = tokenizer_with(TEMPLATE)
    (ids,) = encode_prompts([row], tokenizer, TrainConfig(**options), 1024)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_worked_examples_are_turns_before_the_question_without_annotations() -> None:
    tokenizer, config = tokenizer_with(TEMPLATE), TrainConfig(instruction="Go.", system_prompt="Think.")
    solved = {"A?": "2*3=<<2*3=6>>6\n#### 6", "B?": "#### 7"}
    examples = [Row({"question": question, "answer": answer}) for question, answer in solved.items()]
    (ids,) = encode_prompts([Row(GOOD)], tokenizer, config, 1024, examples)
    turns = "<system> Think. <user> A?\nGo. <assistant> 2*3=6\n#### 6 <user> B?\nGo. <assistant> #### 7 "
    assert ids == tokenizer(f"{turns}<user> How many?\nGo. ", add_special_tokens=False)["input_ids"]
    with pytest.raises(ValueError, match="a row: examples go before a question that is text, not messages"):
        encode_prompts([Row(GOOD, messages=CHAT)], tokenizer, config, 1024, examples)


def test_the_shortest_of_the_first_256_rows_are_examples_and_are_not_asked() -> None:
    rows = [Row({"question": f"{'long ' * (300 - i)}{i}?", "answer": "#### 5"}) for i in range(300)]
    rows.append(Row(rows[255] | {"answer": "#### 6"}))  # a question that comes again
    examples, others = take_examples(rows, 3)
    assert examples == [rows[255], rows[254], rows[253]]
    assert others == rows[:253] + rows[256:300]
    assert take_examples(rows, 0) == ([], rows)
    with pytest.raises(ValueError, match="examples: 2 of 2 training problems leave none to train on"):
        take_examples(rows[:2], 2)


def test_a_template_that_writes_the_date_writes_that_of_the_runs_begin() -> None:
    stop_clock(datetime.datetime(2026, 11, 26))
    tokenizer = tokenizer_with("{{ strftime_now('%d') }} {{ messages[0]['content'] }}")
    (ids,) = encode_prompts([Row(GOOD)], tokenizer, TrainConfig(instruction=""), 1024)
    assert ids == tokenizer("26 How many?", add_special_tokens=False)["input_ids"]


def test_without_a_chat_template_the_program_writes_the_prompt() -> None:
    tokenizer = tokenizer_with(None)
    (ids,) = encode_prompts([Row(GOOD)], tokenizer, TrainConfig(instruction="Think."), 1024)
    assert ids == tokenizer("Question: How many?\nThink.\nAnswer:")["input_ids"]
    with pytest.raises(ValueError, match=r"embedded cannot write the prompt: .* without a chat template takes"):
        encode_prompts([Row(GOOD)], tokenizer, TrainConfig(system_prompt="Think."), 1024)
    with pytest.raises(ValueError, match="enable_thinking: the chat template of model embedded does not read it"):
        encode_prompts([Row(GOOD)], tokenizer, TrainConfig(enable_thinking=True), 1024)


def test_a_prompt_that_does_not_fit_is_named_with_its_data_set_and_its_row_of_the_file(tmp_path) -> None:
    long = GOOD | {"question": "How many is far too many for this one?" * 3}
    name = write(tmp_path / "data.jsonl", [GOOD | {"question": f"How {i}?"} for i in range(9)] + [long])
    config = TrainConfig(dataset=name, eval_problems=3, instruction="", max_completion_length=512)
    train, test = train_and_eval_rows(config)  # shuffled
    tokenizer = tokenizer_with(None)
    size = len(encode_prompts(train + test, tokenizer, config, None)[(train + test).index(long)])
    assert len(encode_prompts(train + test, tokenizer, config, 512 + size)) == 10
    said = rf"^dataset {name}, row 9: the prompt has {size} tokens, and {size - 1} fit beside max_completion_length"
    with pytest.raises(ValueError, match=said):
        encode_prompts(train + test, tokenizer, config, 511 + size)
