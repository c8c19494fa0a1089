"""The tokenizers of Mistral's models, as transformers gives them where mistral-common is installed."""

import json
from pathlib import Path
from typing import Any

import pytest

from cfa_kernels import detect_spans, find_answer
from cfa_kernels.text.find import content_text
from cfa_kernels.text.offsets import token_offsets

mistral_common = pytest.importorskip("mistral_common", reason="mistral-common is not installed")
DATA = Path(mistral_common.__file__).parent / "data"
FILES = sorted(path for path in DATA.iterdir() if path.name.startswith(("tekken", "tokenizer", "mistral_instruct")))


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.name)
def tokenizer(request) -> Any:
    from transformers import MistralCommonBackend

    return MistralCommonBackend(tokenizer_path=request.param)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Any:
    """A tokenizer with signs of thought as special tokens, as Magistral's."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    from transformers import MistralCommonBackend

    saved = json.loads(next(path for path in FILES if path.suffix == ".json").read_text("utf-8"))
    names = [
        str(getattr(token["token_str"], "value", token["token_str"])) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS
    ]
    names += ["[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]
    saved["special_tokens"] = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    saved["config"]["version"] = "v13"
    path = tmp_path_factory.mktemp("magistral") / "tekken.json"
    path.write_text(json.dumps(saved))
    return MistralCommonBackend(tokenizer_path=path)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "answer", "spans"),
    [
        ("She makes 9 * 2 = 18 dollars every day 🙂 – naïve.\n#### 18", "18", ["9 * 2 = 18"]),
        ("Она получит 9 * 2 = 18 рублей.\n\nThe answer is **1,234.50**", "1,234.50", ["9 * 2 = 18"]),
        (" leading blank: 3 + 4 = 7\n#### -7", "-7", ["3 + 4 = 7"]),
        ("答案: 3 × 4 = 12 元。\n#### 12", "12", ["3 × 4 = 12"]),
    ],
)
def test_answers_and_spans_are_found_in_their_tokens(tokenizer, text, answer, spans) -> None:
    ids = encode(tokenizer, text)
    offsets = token_offsets(ids, tokenizer)
    assert offsets.text.strip() == text.strip()

    def spelled(span) -> str:
        return offsets.text[offsets.starts[span.start] : offsets.ends[span.end - 1]].strip()

    assert spelled(find_answer(ids, tokenizer)) == answer
    assert [spelled(span) for span in detect_spans(ids, tokenizer)] == spans


def test_no_answer_is_in_a_thought_between_their_special_tokens(thinking) -> None:
    opener, closer = thinking.convert_tokens_to_ids("[THINK]"), thinking.convert_tokens_to_ids("[/THINK]")
    thought, answer = encode(thinking, "Is it 17? #### 17 🙂"), encode(thinking, "So #### 18")
    assert find_answer([opener, *thought], thinking) is None
    assert find_answer(thought, thinking, prompt=[*answer, opener]) is None
    for ids, prompt in (([opener, *thought, closer, *answer], None), ([*thought, closer, *answer], [opener])):
        span = find_answer(ids, thinking, prompt=prompt)
        assert thinking.decode(ids[slice(*span)]).strip() == "18"
        content = content_text(ids, thinking, prompt=prompt)
        assert (content.count("18"), content.count("17")) == (1, 0)
    assert token_offsets([opener, *thought, closer], thinking).text == "Is it 17? #### 17 🙂"
