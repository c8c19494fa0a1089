"""TRL's own loop of tools: a span never holds what a tool wrote."""

from typing import Any

import pytest
import transformers
from packaging.version import Version

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from datasets import Dataset  # noqa: E402

from tests.support.tiny import PHRASES, tiny_model, tiny_tokenizer  # noqa: E402
from tests.support.trl_training import (  # noqa: E402
    PROMPT,
    RELEASE,
    logged,
    record_generations,
)

pytestmark = [
    pytest.mark.slow, pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(RELEASE < (1, 14), reason="TRL's loop of tools has this interface from 1.14 on"),
    pytest.mark.skipif(Version(transformers.__version__) < Version("5.13"), reason="the response template is 5.13's"),
]  # fmt: skip

CALL = '{"name": "add", "arguments": {"a": 3, "b": 4}}'
BROKEN = '{"name": "halve", "arguments": {}}'  # no such tool
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}  # fmt: skip


def tokenizer_with_tools() -> Any:
    """The tiny tokenizer, with a template for tools whose text is read back in the tokens that sampling has."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([*PHRASES, "<tool_call>", "</tool_call>", CALL, BROKEN, "tool"])
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    return tokenizer


def model_with_tools() -> Any:
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer_with_tools()), mean_resizing=False)
    return model


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second

    Returns:
        The sum, in a text that reads like a solution.
    """
    return f"{a} + {b} = 7. #### 7"


def turns(i: int) -> list[list[str]]:
    """What completion i writes: none, one or two calls before its answer."""
    calls = [[PHRASES[2], "<tool_call>", CALL, "</tool_call>"], ["<tool_call>", BROKEN, "</tool_call>"]]
    answer = [PHRASES[0], PHRASES[4 if i % 3 else 5]]
    return [*calls[: i % 3], answer]


def scripted(cls: type) -> type:
    """A trainer that samples `turns`, through TRL's own loop of tools."""

    class Scripted(cls):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("num_generations") != 1:  # the first turn of a batch
                self.remaining = [turns(i) for i in range(len(prompt_ids))]
            vocabulary = self.processing_class.get_vocab()
            written = [row.pop(0) for row in self.remaining if row]
            assert len(written) == len(prompt_ids)
            return [[*(vocabulary[text] for text in turn), 1] for turn in written], None

    return Scripted


def seven(completions: list[Any], **kwargs: object) -> list[float]:
    return [float(completion[-1]["content"].endswith("#### 7")) for completion in completions]


CONVERSATIONS = Dataset.from_dict({"prompt": [[{"role": "user", "content": PROMPT}]] * 8})


@pytest.mark.parametrize("packed", [False, True])
def test_a_span_never_holds_what_a_tool_wrote(train, monkeypatch, packed):
    batches, make = [], integration.batch_credit

    def recording(*args: Any, **kwargs: Any) -> Any:
        batches.append(make(*args, **kwargs))
        return batches[-1]

    monkeypatch.setattr(integration, "batch_credit", recording)
    recorded, record = record_generations()
    given = {
        "tools": [add], "train_dataset": CONVERSATIONS, "processing_class": tokenizer_with_tools(),
        "model": model_with_tools(), "reward_funcs": seven, "packed_loss": packed,
    }  # fmt: skip
    trainer = train(scripted(recorded), trainer=given, max_completion_length=64)
    ((_, output, _),), (batch,) = record, batches
    mask = output["tool_mask"]
    assert 0 < mask[output["completion_mask"].bool()].float().mean() < 1
    by_tools = [row[~own.bool()] for row, own in zip(batch.batch.rows.completions, batch.batch.mask, strict=True)]
    assert any("= 7. #### 7" in trainer.processing_class.decode(ids) for ids in by_tools)  # it reads like a solution
    ((_, credit),) = batch.parts
    units = [(own, unit) for own, spans in zip(batch.batch.mask, credit.spans, strict=True) for unit in spans]
    assert len(units) > 8
    assert all(own[unit.start : unit.end].all() for own, unit in units)
    assert all(own[span.start : span.end].all() for own, span in zip(batch.batch.mask, credit.answers, strict=True))
    assert logged(trainer, "credit/scored_fraction") == [1.0]
