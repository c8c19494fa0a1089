"""From sampled ids to the answer and the spans, on small tokenizers of each family and on real model output."""

import functools
import gc
import itertools
import json
import re
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cfa_kernels import token_offsets as offsets_module
from cfa_kernels.solution_text import answer_text_span, math_intervals, sentence_intervals
from cfa_kernels.spans import DETECTORS, Span, detect_spans, find_answer, find_answers_and_spans
from cfa_kernels.token_offsets import token_offsets

property_test = settings(deadline=None, max_examples=60, derandomize=True)

CORPUS = [
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18",
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn total she sold 48+24 = 72 clips.\n#### 72",
    "Thus, the total cost is $1,250.50 + $149.50 = $1,400.00. The answer is $1,400.",
    r"So \( 20\% \times 50 = 10 \) and \[ \frac{1}{2} \cdot 36 = 18 \]. The final answer is \boxed{28}.",
    "Renée’s bill is 25€ × 3 = 75€. Das macht 75 €. 她有16个苹果。一共是 16 − 3 = 13 个。🦆🦆 quack 👩‍👩‍👧",
    "First find the number of hours: 3 hours/day * 7 days = 21 hours\nThen multiply: 21 * 12 = 252\n#### 252",
]
FRAGMENTS = [
    *(
        "She has 16 eggs. ",
        "Then ",
        "16 - 3 = 13",
        "9 * 2 = $<<9*2=18>>18",
        "\n",
        ". ",
        " ",
        "\n\n",
        "1/2",
        "3-4 days, ",
    ),
    *(
        "Mr. Lee pays $1,250.50",
        "25€ × 3 = 75€",
        "她有16个苹果。",
        "🦆",
        "é",
        "(",
        "x + 2x = 36",
        r"\frac{1}{6} \times 36",
    ),
    *("(16-3)*2=26", "<<5+3=8>>8", "=", "+", "\ufffd", "**"),
]
MARKERS = [
    ("#### ", ""),
    ("\n#### $", " dollars"),
    (r"\boxed{", "}"),
    (r"$\boxed{", "}$"),
    (r"The final answer is $\boxed{", "}$."),
    ("The answer is ", "."),
    ("So the answer is: **", "**"),
]
ANSWERS = ["18", "-5", "1,234", "18.50", "3/4", "−7"]


def _byte_level(digits: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if digits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=640,
            special_tokens=["<|eos|>", "<|pad|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def _sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """A vocabulary laid out like Llama 2's: specials, 256 byte tokens, then merged pieces with a leading ▁."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation(), pre_tokenizers.Split("\n", "isolated")]
    )
    ascii_only = ["".join(c for c in text if c.isascii()) for text in CORPUS]
    trained.train_from_iterator(ascii_only * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<|eos|>", "<|pad|>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    return tokenizer


def _word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        CORPUS * 3,
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>", "<|eos|>", "<|pad|>"], show_progress=False),
    )
    return tokenizer


class CharacterTokenizer(PreTrainedTokenizer):
    """One token per character, in Python: a tokenizer without a fast backend."""

    def __init__(self, **kwargs: str) -> None:
        alphabet = sorted({character for text in CORPUS for character in text})
        self.names = ["<unk>", "<|eos|>", "<|pad|>", *alphabet]
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self.names)

    def get_vocab(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def _tokenize(self, text: str, **_: object) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.names.index(token) if token in self.names else 0

    def _convert_id_to_token(self, index: int) -> str:
        return self.names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


REPLACE_BLANK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
BACKENDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level, merged digits": lambda: _byte_level(None),
    "byte-level, single digits": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "byte-fallback, blank stripped": lambda: _sentencepiece(
        decoders.Sequence([*REPLACE_BLANK, decoders.Strip(" ", 1, 0)])
    ),
    "byte-fallback, blank kept": lambda: _sentencepiece(decoders.Sequence(REPLACE_BLANK)),
    "metaspace": lambda: _sentencepiece(decoders.Metaspace()),
    "word pieces": _word_pieces,
}
FAST = [name for name in BACKENDS if name.startswith("byte-")]
TOKENIZERS = [*BACKENDS, "characters"]
MULTI_BYTE = FAST  # families that can spell any text


def _wrap(backend: Tokenizer, cls: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer = cls(tokenizer_object=backend, eos_token="<|eos|>", pad_token="<|pad|>", unk_token=None)
    tokenizer.add_tokens(["<think>", "日本 語"])  # ordinary added tokens: they are text
    return tokenizer


@functools.cache
def get_tokenizer(name: str) -> PreTrainedTokenizerBase:
    if name == "characters":
        return CharacterTokenizer(eos_token="<|eos|>", pad_token="<|pad|>", unk_token="<unk>")
    tokenizer = _wrap(BACKENDS[name]())
    tokenizer.clean_up_tokenization_spaces = True
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def offsets_by_decoding_every_prefix(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[tuple[int, int]]]:
    """The definition: a token holds what its arrival changes in the decoding of the tokens so far."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = [
        tokenizer.decode(ids[:n], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for n in range(len(ids) + 1)
    ]
    final = texts[-1]
    agreed, reached = [], []
    for text in texts:
        common = next(
            (k for k, (a, b) in enumerate(zip(text, final, strict=False)) if a != b), min(len(text), len(final))
        )
        agreed.append(max([common, *agreed]))
        reached.append(max([min(agreed[-1] + (len(text) > agreed[-1]), len(final)), *reached]))
    return final, [(agreed[n], reached[n]) if i in special else (agreed[n], reached[n + 1]) for n, i in enumerate(ids)]


def span_texts(text: str, tokenizer: PreTrainedTokenizerBase, **options: object) -> list[str]:
    ids = encode(tokenizer, text)
    offsets = token_offsets(ids, tokenizer)
    return [
        offsets.text[offsets.starts[s] : offsets.ends[e - 1]].strip()
        for s, e in detect_spans(ids, tokenizer, **options)
    ]


# Ids as a model may sample them: text, broken multi-byte characters, specials, anything.
SNIPPETS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=6)), max_size=12).map("".join)


def completions(name: str) -> st.SearchStrategy[list[int]]:
    tokenizer = get_tokenizer(name)
    noise = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    answers = st.tuples(st.sampled_from(MARKERS), st.sampled_from(ANSWERS)).map(lambda m: m[0][0] + m[1] + m[0][1])
    parts = st.lists(st.one_of(SNIPPETS.map(lambda text: encode(tokenizer, text)), noise), max_size=4)
    ends = st.one_of(st.just(""), answers, answers.map(lambda text: text + text)).map(
        lambda text: encode(tokenizer, text)
    )
    return st.tuples(parts, ends, noise | st.just([])).map(lambda p: [*itertools.chain(*p[0]), *p[1], *p[2]])


# --- Text: where the answer stands -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 18", "18"),
        ("#### $18", "18"),
        ("#### **18**", "18"),
        (r"#### \boxed{18}", "18"),
        ("#### 18.", "18"),
        ("#### 18.00", "18.00"),
        ("#### -5", "-5"),
        ("#### \u22125", "\u22125"),
        ("#### -$5", "-$5"),
        ("#### $-5", "-5"),
        ("#### 16\nNo, that is wrong.\n#### 18", "18"),
        ("#### 18\n#### ", "18"),
        ("#### 18 eggs are left for the next 7 days", "18"),
        ("#### 1,234,567 dollars", "1,234,567"),
        ("#### 10 000", "10 000"),
        ("#### 18, 20 or 22", "18"),
        ("#### The answer is: 18", "18"),
        ("####\n18", "18"),
        ("#### 3/4", "3/4"),
        ("#### 1 1/2 cups", "1 1/2"),
        (r"#### \frac{3}{4}", r"\frac{3}{4}"),
        ("#### 3 * 6 = 18", "18"),
        ("#### 3*6=$<<3*6=18>>18", "18"),
        ("#### 36+36", "36+36"),
        (r"\boxed{7} but then #### 18", "18"),
        ("#### Janet sells eggs", None),
        ("####", None),
        ("#### 1. Count the eggs\n#### 2. Sell them\nso \\boxed{18}", "18"),
        ("#### 2. Nothing boxed below", "2"),
        (r"\boxed{18}", "18"),
        (r"First \boxed{16}, no: $\boxed{18}$", "18"),
        (r"\boxed{18} and \boxed{19 which never ends", "18"),
        (r"\boxed{18} and \boxed{ }", "18"),
        (r"\boxed{\text{18}}", "18"),
        (r"\boxed{18 \text{ eggs}}", "18"),
        (r"\boxed{\$18.50}", "18.50"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{1{,}234}", "1{,}234"),
        (r"\boxed{x = 18}", "18"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{ x^{2} + {y} }", "x^{2} + {y}"),
        (r"\boxed{36+36}", "36+36"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{18}}", "18"),
        (r"The answer is 7. So \boxed{18}.", "18"),
        ("The answer is 18...", "18"),
        ("THE FINAL ANSWER IS: $1,018.50.", "1,018.50"),
        ("The answer is therefore 18 eggs.", "18"),
        ("The answer is 5. Wait, the answer is 7.", "7"),
        ("The answer is 16 - 7 = 9 eggs", "9"),
        ("The answer is no. There are 5 eggs.", None),
        ("The answer is eighteen", None),
        ("She makes 18 dollars.", None),
        ("A: 18", None),
        ("", None),
    ],
)
def test_the_answer_is_the_number_that_the_marker_announces(text: str, answer: str | None) -> None:
    span = answer_text_span(text)
    assert (None if span is None else text[slice(*span)]) == answer


@pytest.mark.parametrize(
    ("text", "expressions"),
    [
        ("Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs", ["16 - 3 - 4 = <<16-3-4=9>>9"]),
        ("She makes 9 * 2 = $<<9*2=18>>18 and 48/2=24", ["9 * 2 = $<<9*2=18>>18", "48/2=24"]),
        ("He has <<5+3=8>>8 eggs", ["<<5+3=8>>8"]),
        ("16 eggs - 3 eggs = 13 eggs left", ["16 eggs - 3 eggs = 13"]),
        ("15 cups of lemonade per hour * 4 hours", ["15 cups of lemonade per hour * 4"]),
        ("$200 + $5/person = $205", ["$200 + $5/person = $205"]),
        ("Renée’s 25€ × 3 = 75€ total", ["25€ × 3 = 75€"]),
        ("12 ÷ 4 · 2 = 6", ["12 ÷ 4 · 2 = 6"]),
        ("$1,250.50 + $.50 = $1,251", ["$1,250.50 + $.50 = $1,251"]),
        ("costs $350 000 x 5/100 = 17 500.", ["$350 000 x 5/100 = 17 500"]),
        ("20% of 50 = 10 and 5 boxes of 12 = 60", ["20% of 50 = 10", "5 boxes of 12 = 60"]),
        (r"\frac{1}{6} \times 36 = 6", [r"\frac{1}{6} \times 36 = 6"]),
        (r"16 \div 4 \cdot 2 = 8", [r"16 \div 4 \cdot 2 = 8"]),
        (r"16 \text{ eggs} - 3 \text{ eggs} = 13", [r"16 \text{ eggs} - 3 \text{ eggs} = 13"]),
        ("so x + 2x = 36, then 3x = 36", ["x + 2x = 36", "3x = 36"]),
        ("2 * (3 + 4) = 14", ["2 * (3 + 4) = 14"]),
        ("2x3 and 4 x 5", ["2x3", "4 x 5"]),
        ("3 times 4 equals 12", ["3 times 4 equals 12"]),
        ("16-3-4 eggs", ["16-3-4"]),
        ("4455-4545 = -90", ["4455-4545 = -90"]),
        ("5 + 3\n= 8\n5 eggs", ["5 + 3\n= 8"]),
        ("16 − 3 = 13 个，3 苹果 + 4 苹果 = 7", ["16 − 3 = 13", "3 苹果 + 4 苹果 = 7"]),
        ("- 16 - 3 = 13", ["16 - 3 = 13"]),
        ("the rest, 16 - 7 =", ["16 - 7 ="]),
        ("half, 1/2, in 3-4 days on 12/05", []),
        ("He has 16 eggs and eats 3", []),
        ("a - b = c is no number, nor A/B", []),
        ("a 3-D printer, 5 T-shirts", []),
    ],
)
def test_arithmetic_is_found_as_models_write_it(text: str, expressions: list[str]) -> None:
    found = [text[slice(*interval)] for interval in math_intervals(text)]
    sentences = [text[slice(*interval)] for interval in sentence_intervals(text)]
    assert [part for part in found if part not in sentences or part in expressions] == expressions


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Mr. Lee has 3.5 kg. He eats! Why?\nNo end", ["Mr. Lee has 3.5 kg.", "He eats!", "Why?", "No end"]),
        ("1. Count. 2. Sell.\n3. Stop", ["1. Count.", "2. Sell.", "3. Stop"]),
        ('He said "Yes." Then... nothing', ['He said "Yes."', "Then...", "nothing"]),
        ("她有16个。他呢？没有", ["她有16个。", "他呢？", "没有"]),
        ("  \n---\n* lead. \n", ["* lead."]),
        ("", []),
    ],
)
def test_sentences_end_at_full_stops_and_line_breaks(text: str, sentences: list[str]) -> None:
    assert [text[slice(*interval)] for interval in sentence_intervals(text)] == sentences


@pytest.mark.parametrize(
    "unit",
    [
        "1",
        "(",
        "1,",
        "1,11,",
        "<<1",
        "a ",
        "1 ab ",
        "\\boxed{",
        "#### 1. a ",
        "\\frac{",
        "answer is ",
        "a=",
        "1 of ",
        "- ",
    ],
)
def test_degenerate_repetition_is_read_in_linear_time(unit: str) -> None:
    def seconds(length: int) -> float:
        text = (unit * length)[:length] + r"\boxed{$"
        times = []
        for _ in range(3):
            start = time.process_time()
            answer_text_span(text)
            math_intervals(text)
            times.append(time.process_time() - start)
        return min(times)

    # Sixteen times the text: quadratic matching would take 256 times as long.
    assert seconds(32_000) < 64 * max(seconds(2_000), 2e-4)


# --- Token ids to characters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@property_test
@given(data=st.data())
def test_offsets_are_those_of_decoding_every_prefix(name: str, data: st.DataObject) -> None:
    tokenizer = get_tokenizer(name)
    ids = data.draw(completions(name))
    # U+FFFD spelled in fallback bytes looks like their failure: what its prefixes show depends on the bytes before.
    assume("<0xEF><0xBF><0xBD>" not in "".join(tokenizer.convert_ids_to_tokens(ids)))
    text, intervals = offsets_by_decoding_every_prefix(ids, tokenizer)
    offsets = token_offsets(ids, tokenizer)
    assert offsets.text == text
    assert list(zip(offsets.starts.tolist(), offsets.ends.tolist(), strict=True)) == intervals


@pytest.mark.parametrize("name", FAST)
@property_test
@given(data=st.data())
def test_offsets_from_bytes_equal_incremental_decoding(name: str, data: st.DataObject) -> None:
    tokenizer = get_tokenizer(name)
    vocabulary = offsets_module._vocabulary(tokenizer)
    assert vocabulary.style == ("byte_level" if "level" in name else "byte_fallback")
    ids = data.draw(completions(name))
    fast = vocabulary.offsets(ids, tokenizer)
    slow = offsets_module._incremental_offsets(ids, vocabulary.special, lambda part: vocabulary.decode(part, tokenizer))
    assert fast.text == slow.text
    np.testing.assert_array_equal(fast.starts, slow.starts)
    np.testing.assert_array_equal(fast.ends, slow.ends)


@pytest.mark.parametrize("name", TOKENIZERS)
@property_test
@given(data=st.data())
def test_every_character_is_held_by_a_token_and_offsets_never_go_back(name: str, data: st.DataObject) -> None:
    tokenizer = get_tokenizer(name)
    offsets = token_offsets(data.draw(completions(name)), tokenizer)
    held = np.zeros(len(offsets.text), bool)
    for start, end in zip(offsets.starts, offsets.ends, strict=True):
        held[start:end] = True
    assert held.all()
    assert (np.diff(offsets.starts) >= 0).all()
    assert (np.diff(offsets.ends) >= 0).all()
    assert (offsets.starts <= offsets.ends).all()


@pytest.mark.parametrize("name", MULTI_BYTE)
@pytest.mark.parametrize("text", ["Renée’s 25€ × 3 = 75€", "她有16个苹果", "quack 🦆👩‍👩‍👧!"])
def test_tokens_that_share_a_multi_byte_character_all_hold_it(name: str, text: str) -> None:
    tokenizer = get_tokenizer(name)
    # One token per byte, whatever merges exist.
    byte_names = {byte: character for character, byte in offsets_module._BYTE_OF.items()}
    tokens = [byte_names[b] if "level" in name else f"<0x{b:02X}>" for b in text.encode()]
    offsets = token_offsets(tokenizer.convert_tokens_to_ids(tokens), tokenizer)
    characters = [n for n, character in enumerate(text) for _ in character.encode()]
    assert offsets.text == text
    assert offsets.starts.tolist() == characters
    assert offsets.ends.tolist() == [n + 1 for n in characters]


def test_an_unreadable_character_belongs_to_the_token_that_begins_it() -> None:
    tokenizer = get_tokenizer("byte-level, merged digits")
    byte_names = {byte: character for character, byte in offsets_module._BYTE_OF.items()}
    ids = tokenizer.convert_tokens_to_ids([byte_names[b] for b in b"a\xe4\xb8b\xff"])
    offsets = token_offsets(ids, tokenizer)
    assert offsets.text == "a\ufffdb\ufffd"
    assert offsets.starts.tolist() == [0, 1, 2, 2, 3]
    assert offsets.ends.tolist() == [1, 2, 2, 3, 4]


@pytest.mark.parametrize("name", FAST)
def test_detection_calls_no_decode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = get_tokenizer(name)
    ids = [encode(tokenizer, text) for text in CORPUS]
    expected = [detect_spans(row, tokenizer) for row in ids]
    calls: list[object] = []
    for method in ("decode", "_decode", "batch_decode", "convert_ids_to_tokens"):
        monkeypatch.setattr(type(tokenizer), method, lambda *a, **k: calls.append(a))
    assert [detect_spans(row, tokenizer) for row in ids] == expected
    assert any(expected)
    assert calls == []


def test_a_tokenizer_that_decodes_in_its_own_way_is_believed() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: object, **kwargs: object) -> str:
            return super()._decode(*args, **kwargs).upper()

    tokenizer = _wrap(_byte_level(None), Shouting)
    assert token_offsets(encode(tokenizer, "She has 3 eggs"), tokenizer).text == "SHE HAS 3 EGGS"


def test_tokens_added_later_are_known() -> None:
    tokenizer = _wrap(_byte_level(None))
    ids = encode(tokenizer, "She has 3")
    with pytest.raises(ValueError, match="outside the tokenizer's vocabulary"):
        token_offsets([*ids, len(tokenizer)], tokenizer)
    tokenizer.add_tokens(["<extra>"])
    assert token_offsets([*ids, len(tokenizer) - 1], tokenizer).text == "She has 3<extra>"
    tokenizer.add_special_tokens({"bos_token": "<extra>"})
    assert token_offsets([*ids, len(tokenizer) - 1], tokenizer).text == "She has 3"


def test_a_used_tokenizer_can_be_collected() -> None:
    tokenizer = _wrap(_byte_level(None))
    detect_spans(encode(tokenizer, CORPUS[0]), tokenizer)
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None


# --- Token ids to spans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(
    ("text", "spans"),
    [
        (
            "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe is rich.\n"
            "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18",
            ["16 - 3 - 4 = <<16-3-4=9>>9", "She is rich.", "9 * 2 = $<<9*2=18>>18"],
        ),
        (r"We know $16 - 7 = \boxed{9}$ and stop at 3 + 3 = 6.", ["$16 - 7 ="]),
        ("First 2 + 3 = 5. So the final answer is: **$5** 1 + 1 = 2", ["2 + 3 = 5"]),
        ("Renée’s 25€ × 3 = 75€. 她有苹果。🦆 quack\n#### 75", ["25€ × 3 = 75€", "她有苹果。", "🦆 quack"]),
        ("#### 16\nNo. 16 + 2 = 18\n#### 18", ["#### 16", "No.", "16 + 2 = 18"]),
        ("#### 18", []),
        ("One. Two! 3 + 4 = 7", ["One.", "Two!", "3 + 4 = 7"]),
    ],
)
def test_spans_are_the_arithmetic_and_the_other_sentences_before_the_marker(
    name: str, text: str, spans: list[str]
) -> None:
    # Digits and letters decide; where a token boundary falls differently, signs at the edge may be cut or added.
    bare = functools.partial(re.sub, r"^\W+|[^\w€。]+$", "")
    expected = [bare(span) for span in spans]
    assert [bare(span) for span in span_texts(text, get_tokenizer(name))] == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("detector", DETECTORS)
@property_test
@given(data=st.data())
def test_spans_are_sorted_disjoint_inside_and_clear_of_the_answer(
    name: str, detector: str, data: st.DataObject
) -> None:
    tokenizer = get_tokenizer(name)
    ids = data.draw(completions(name))
    max_spans = data.draw(st.integers(1, 6))
    selection = data.draw(st.sampled_from(["first", "longest"]))
    answer = find_answer(ids, tokenizer)
    spans = detect_spans(ids, tokenizer, detector=detector, max_spans=max_spans, selection=selection)
    assert len(spans) <= max_spans
    assert all(span.start < span.end for span in spans)
    bounds = [edge for span in spans for edge in span]
    assert bounds == sorted(bounds)
    assert all(0 <= edge <= len(ids) for edge in bounds)
    if answer:
        assert all(span.end <= answer.start for span in spans)
    options = {"detector": detector, "max_spans": max_spans, "selection": selection}
    assert spans == detect_spans(ids, tokenizer, answer=answer, **options)
    assert find_answers_and_spans({4: ids, 2: []}, tokenizer, **options) == {
        4: (answer, spans if answer else []),
        2: (None, []),
    }


@pytest.mark.parametrize("name", MULTI_BYTE)
@property_test
@given(
    reasoning=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    marker=st.sampled_from(MARKERS),
    number=st.sampled_from(ANSWERS),
)
def test_no_span_touches_the_marker(name: str, reasoning: str, marker: tuple[str, str], number: str) -> None:
    tokenizer = get_tokenizer(name)
    ids = encode(tokenizer, reasoning + " " + marker[0] + number + marker[1])
    offsets = token_offsets(ids, tokenizer)
    answer = find_answer(ids, tokenizer)
    assert answer is not None
    assert offsets.text[slice(*answer_text_span(offsets.text))] == number
    start = offsets.text.rindex(marker[0].strip(), 0, offsets.starts[answer.start] + len(marker[0]))
    assert all(offsets.ends[span.end - 1] <= start for span in detect_spans(ids, tokenizer))


@pytest.mark.parametrize("name", TOKENIZERS)
@property_test
@given(data=st.data())
def test_the_answer_tokens_spell_the_answer_and_no_token_more(name: str, data: st.DataObject) -> None:
    tokenizer = get_tokenizer(name)
    ids = data.draw(completions(name))
    answer = find_answer(ids, tokenizer)
    assume(answer is not None)
    offsets = token_offsets(ids, tokenizer)
    start, end = answer_text_span(offsets.text)
    if "\ufffd" not in offsets.text:
        text = tokenizer.decode(ids[slice(*answer)], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert offsets.text[start:end] in text
    touching = [t for t in range(len(ids)) if offsets.starts[t] < end and offsets.ends[t] > start]
    assert answer == Span(touching[0], touching[-1] + 1)


@pytest.mark.parametrize("name", TOKENIZERS)
@property_test
@given(data=st.data())
def test_appended_eos_and_padding_change_nothing(name: str, data: st.DataObject) -> None:
    tokenizer = get_tokenizer(name)
    ids = data.draw(completions(name))
    padded = [*ids, tokenizer.eos_token_id, *[tokenizer.pad_token_id] * data.draw(st.integers(0, 3))]
    assert find_answer(padded, tokenizer) == find_answer(ids, tokenizer)
    assert detect_spans(padded, tokenizer) == detect_spans(ids, tokenizer)


def test_errors_about_one_completion_of_many_name_its_row() -> None:
    tokenizer = get_tokenizer("byte-level, single digits")
    ids = encode(tokenizer, CORPUS[0])
    with pytest.raises(ValueError, match=r"row 7: token_ids\[1\] is 99999999, outside"):
        find_answers_and_spans({3: ids, 7: [ids[0], 99_999_999]}, tokenizer)
    with pytest.raises(TypeError, match=r"row 7: token_ids\[0\] must be an integer, got 1.5"):
        find_answers_and_spans({3: ids, 7: [1.5]}, tokenizer)


@pytest.mark.parametrize("name", FAST)
def test_tensors_and_numpy_integers_are_read_like_lists(name: str) -> None:
    tokenizer = get_tokenizer(name)
    ids = encode(tokenizer, CORPUS[0])
    for same in (tuple(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32), np.array(ids)):
        assert find_answer(same, tokenizer) == find_answer(ids, tokenizer)
        assert detect_spans(same, tokenizer) == detect_spans(ids, tokenizer)


def test_an_empty_completion_has_neither_answer_nor_spans() -> None:
    for name in TOKENIZERS:
        assert find_answer([], get_tokenizer(name)) is None
        assert detect_spans([], get_tokenizer(name)) == []


def test_first_prefers_arithmetic_and_longest_prefers_length() -> None:
    tokenizer = get_tokenizer("byte-level, single digits")
    text = "Short.\n1 + 2 = 3\nA sentence that is by far the longest one of them all.\n4 * 5 = 20 - 0\n#### 20"
    assert span_texts(text, tokenizer, max_spans=2) == ["1 + 2 = 3", "4 * 5 = 20 - 0"]
    assert span_texts(text, tokenizer, max_spans=2, detector="sentence") == ["Short.", "1 + 2 = 3"]
    longest = span_texts(text, tokenizer, max_spans=2, selection="longest")
    assert longest == ["A sentence that is by far the longest one of them all.", "4 * 5 = 20 - 0"]


@pytest.mark.parametrize(
    ("text", "answer", "spans"),
    [
        ("We get 1 + 2 = 3. Then 4 + 5 = 9. Done", "9", ["1 + 2 = 3", "4 + 5 ="]),
        ("We get 1 + 2 = 3. #### 8", "8", ["1 + 2 = 3"]),
        ("#### 5\nCheck 2 + 3 = 5, so 7", "7", ["#### 5", "2 + 3 = 5"]),
    ],
)
def test_a_given_answer_bounds_the_reasoning_whatever_the_text_marks(text: str, answer: str, spans: list[str]) -> None:
    tokenizer = get_tokenizer("byte-level, single digits")
    start = text.index(answer)
    tokens = token_offsets(encode(tokenizer, text), tokenizer).tokens([(start, start + 1)])[0]
    assert span_texts(text, tokenizer, answer=Span(*tokens)) == spans


def test_detectors_of_ones_own_see_the_reasoning_and_rank_their_spans() -> None:
    tokenizer = get_tokenizer("byte-level, single digits")
    text = "alpha beta gamma delta\n#### 4"
    seen = []

    def words(reasoning: str) -> list[tuple[int, int]]:
        seen.append(reasoning)
        starts = [reasoning.index(word) for word in ("gamma", "alpha", "beta", "delta")]
        return [(start, start + 5) for start in starts]

    assert span_texts(text, tokenizer, detector=words, max_spans=2) == ["alpha", "gamma"]
    assert seen == ["alpha beta gamma delta\n"]


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(0, 2), (1, 4)], [Span(0, 1), Span(1, 2)]),  # shares its first token: cut
        ([(2, 4), (0, 3)], [Span(0, 1), Span(1, 2)]),  # shares its last token: cut
        ([(2, 3), (0, 8)], [Span(1, 2)]),  # holds an earlier interval: dropped
        ([(0, 1), (1, 2)], [Span(0, 1)]),  # nothing left of the second
        ([(2, 3), (3, 5)], [Span(1, 2)]),  # only a sign would be left of the second
        ([(0, 8)], [Span(0, 4)]),
    ],
)
def test_overlaps_after_widening_are_settled_in_the_detectors_order(
    intervals: list[tuple[int, int]], expected: list[Span]
) -> None:
    tokenizer = _wrap(_byte_level(None))
    tokenizer.add_tokens(["ab", "cd", "--", "ef"])
    ids = tokenizer.convert_tokens_to_ids(["ab", "cd", "--", "ef"])
    assert detect_spans(ids, tokenizer, detector=lambda _: intervals) == expected


def test_a_token_that_also_holds_the_marker_is_cut_from_the_span() -> None:
    tokenizer = _wrap(_byte_level(None))
    tokenizer.add_tokens(["egg", ".####", "18"])
    ids = tokenizer.convert_tokens_to_ids(["egg", "egg", ".####", "18"])
    assert find_answer(ids, tokenizer) == Span(3, 4)
    assert detect_spans(ids, tokenizer) == [Span(0, 2)]


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        ([5, 1.5], {}, TypeError, r"token_ids\[1\] must be an integer, got 1\.5"),
        ([5, True], {}, TypeError, r"token_ids\[1\] must be an integer, got True"),
        ([[5]], {}, TypeError, r"token_ids\[0\] must be an integer, got \[5\]"),
        (torch.tensor([[5, 6]]), {}, ValueError, r"token_ids must be 1-D, got a tensor of shape \(1, 2\)"),
        (torch.tensor([1.0]), {}, TypeError, "token_ids must be integers, got a tensor of torch.float32"),
        (torch.tensor([True]), {}, TypeError, "token_ids must be integers, got a tensor of torch.bool"),
        ([5, 6, 99_999], {}, ValueError, r"token_ids\[2\] is 99999, outside the tokenizer's vocabulary of \d+ ids"),
        ([5, -100], {}, ValueError, r"token_ids\[1\] is -100, outside"),
        ([5, 2**40], {}, ValueError, r"token_ids\[1\] is 1099511627776, outside"),
        ([5, 6], {"detector": "code"}, ValueError, "detector must be a function or one of math, sentence, got 'code'"),
        ([5, 6], {"detector": 3}, TypeError, "detector must be a name or a function, got 3"),
        ([5, 6], {"selection": "last"}, ValueError, "selection must be one of first, longest, got 'last'"),
        ([5, 6], {"max_spans": 0}, ValueError, "max_spans must be at least 1, got 0"),
        ([5, 6], {"max_spans": 2.0}, TypeError, r"max_spans must be an integer, got 2\.0"),
        ([5, 6], {"answer": Span(1, 3)}, ValueError, r"answer must be .* inside the 2 tokens, got \[1, 3\)"),
        ([5, 6], {"answer": Span(1, 1)}, ValueError, r"answer must be a non-empty span .* got \[1, 1\)"),
        ([5, 6], {"answer": Span(-1, 1)}, ValueError, r"got \[-1, 1\)"),
        ([5, 6], {"detector": lambda text: [(0, 1), (1, 9)]}, ValueError, r"detector's interval 1 is \[1, 9\)"),
        ([5, 6], {"detector": lambda text: [(1, 1)]}, ValueError, r"detector's interval 0 is \[1, 1\)"),
    ],
)
@pytest.mark.parametrize("name", ["byte-level, merged digits", "characters"])
def test_bad_input_is_named(name: str, ids: object, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        detect_spans(ids, get_tokenizer(name), **options)


# --- Real model output -------------------------------------------------------------------------------------------


def real_completions(folder: Path) -> list[str]:
    """Four models' solutions to 660 problems, right and wrong, with the answer line in GSM8K's own format."""
    texts = []
    for line in (folder / "model_solutions.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts += [row[key]["solution"] for key in row if key.startswith(("6b_", "175b_"))]
    return [re.sub(r"\nA: ?([^\n]*)\Z", r"\n#### \1", text.rstrip()) for text in texts]


@pytest.mark.parametrize("name", FAST)
def test_real_solutions_have_answers_and_disjoint_spans(
    name: str, gsm8k: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = get_tokenizer(name)
    texts = real_completions(gsm8k)
    assert len(texts) == 2640
    completion_ids = [encode(tokenizer, text) for text in texts]
    start = time.process_time()
    answers = [find_answer(ids, tokenizer) for ids in completion_ids]
    spans = [detect_spans(ids, tokenizer, answer=answer) for ids, answer in zip(completion_ids, answers, strict=True)]
    seconds = time.process_time() - start

    overlapping_answer = overlapping_each_other = wrong = 0
    for text, ids, answer, row in zip(texts, completion_ids, answers, spans, strict=True):
        taken = np.zeros(len(ids), int)
        for span in row:
            taken[slice(*span)] += 1
        overlapping_each_other += int(taken.max(initial=0) > 1)
        marked = re.search(r"#### (-?[\d.,]*\d)", text)
        if answer is None:
            wrong += marked is not None
            continue
        overlapping_answer += int(taken[answer.start :].any())
        wrong += marked is None or marked[1] not in tokenizer.decode(ids[slice(*answer)])
    counts = np.array([len(row) for row in spans])
    tokens = sum(map(len, completion_ids))
    with capsys.disabled():
        print(
            f"\n{name}: {len(texts)} completions of {tokens / len(texts):.0f} tokens, "
            f"{sum(a is not None for a in answers) / len(texts):.2%} with an answer, "
            f"{counts.mean():.2f} spans each (0: {(counts == 0).sum()}, 10: {(counts == 10).sum()}), "
            f"overlapping the answer: {overlapping_answer}, each other: {overlapping_each_other}, "
            f"{seconds / len(texts) * 128 * 1e3:.1f} ms per 128 completions"
        )
    assert (overlapping_answer, overlapping_each_other, wrong) == (0, 0, 0)
    assert sum(answer is not None for answer in answers) >= 0.99 * len(texts)
    assert counts.mean() >= 3.3
    assert (counts >= 1).mean() >= 0.99
