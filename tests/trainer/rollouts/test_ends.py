"""Where completions end: before a stop string, and at what closes the turns of the chat template."""

import copy
import functools

import pytest
import torch

from cfa_kernels.text.offsets import token_offsets
from tests.support.adapted import PROMPTS, tiny, tokenizer
from trainer.rewards.numbers import exact_match
from trainer.rollouts.engine import Rollouts, end_ids, notes_on_ends
from trainer.rollouts.in_process import TransformersEngine, by_transformers

STOP = ["\nQuestion:", "never"]


def test_a_completion_ends_before_the_first_stop_string_and_is_finished() -> None:
    text, encode = "3 + 4 = 7\n#### 7", functools.partial(tokenizer().encode, add_special_tokens=False)
    rows = [
        encode(text + "\nQuestion: Tom has 9."),
        encode(text),
        encode("\nQuestion: a"),
        [*encode(text), tokenizer().eos_token_id],
    ]
    made = Rollouts.of(
        [[5]] * 4,
        rows,
        [torch.arange(len(row)).float() for row in rows],
        [tokenizer().eos_token_id],
        tokenizer(),
        stop=STOP,
    )
    assert made.texts == [text, text, tokenizer().decode(rows[2][:1]), text]
    assert made.truncated.tolist() == [False, True, False, False]
    assert [len(row) for row in made.logprobs] == made.rows.lengths
    rewards = exact_match(completions=made.texts, answer=["7"] * 4, completion_contents=made.contents)
    assert rewards == [1.0, 0.0, 0.0, 1.0], "7 at the very end of a truncated completion may not be whole"


@pytest.mark.parametrize("how", ["step by step", "captured", "by transformers"])
def test_engines_sample_no_further_than_a_look_behind_a_stop_string(how: str) -> None:
    model, options = tiny(), {"max_completion_length": 60}
    model.generation_config.eos_token_id = tokenizer().eos_token_id

    def engine(stop: list[str]) -> TransformersEngine:
        made = TransformersEngine(model, tokenizer(), captured=how == "captured", stop=stop)
        if how == "by transformers":
            made._decode = functools.partial(by_transformers, model)
        return made

    whole = engine([])(PROMPTS, **options)
    stops = []
    for row in whole.ids():
        offsets = token_offsets(row, tokenizer())
        stops.append(offsets.text[offsets.starts[8] : offsets.ends[11]])
    steps, hook = [], model.register_forward_pre_hook(lambda *_: steps.append(1))
    stopped = engine(stops)(PROMPTS, **options)
    hook.remove()
    assert not stopped.truncated.any()
    assert 8 <= len(steps) <= 40
    for own, before in zip(stopped.ids(), whole.ids(), strict=True):
        assert 0 < len(own) <= 11
        assert own == before[: len(own)]


def test_what_closes_the_templates_turns_ends_completions_and_a_line_says_so() -> None:
    base, model = copy.deepcopy(tokenizer()), tiny()
    turn_end = base.eos_token_id
    base.eos_token = "<|endoftext|>"
    model.generation_config.eos_token_id = base.eos_token_id
    assert end_ids(model, base) == sorted({turn_end, base.eos_token_id})
    (note,) = notes_on_ends(model, base)
    assert repr(base.decode([turn_end])) in note
    assert TransformersEngine(model, base).notes == [note]
    base.chat_template = None
    assert (end_ids(model, base), notes_on_ends(model, base)) == ([base.eos_token_id], [])
    base.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert (end_ids(model, base), notes_on_ends(model, base)) == ([base.eos_token_id], [])
    assert notes_on_ends(tiny(), tokenizer()) == []
