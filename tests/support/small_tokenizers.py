"""Small tokenizers of each family, made on the spot, and completions as a model may sample them."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

property_test = settings(deadline=None, max_examples=25, derandomize=True)

CORPUS = [
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18",
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn total she sold 48+24 = 72 clips.\n#### 72",
    "Thus, the total cost is $1,250.50 + $149.50 = $1,400.00. The answer is $1,400.",
    r"So \( 20\% \times 50 = 10 \) and \[ \frac{1}{2} \cdot 36 = 18 \]. The final answer is \boxed{28}.",
    "Renée’s bill is 25€ × 3 = 75€. Das macht 75 €. 她有16个苹果。一共是 16 − 3 = 13 个。🦆🦆 quack 👩‍👩‍👧",
    "First find the number of hours: 3 hours/day * 7 days = 21 hours\nThen multiply: 21 * 12 = 252\n#### 252",
]
FRAGMENTS = [
    "She has 16 eggs. ", "Then ", "16 - 3 = 13", "9 * 2 = $<<9*2=18>>18", "\n", ". ", " ", "\n\n", "1/2", "3-4 days, ",
    "Mr. Lee pays $1,250.50", "25€ × 3 = 75€", "她有16个苹果。", "🦆", "é", "(", "x + 2x = 36",
    r"\frac{1}{6} \times 36", "(16-3)*2=26", "<<5+3=8>>8", "=", "+", "\ufffd", "**",
]  # fmt: skip
MARKERS = [
    ("#### ", ""), ("\n#### $", " dollars"), (r"\boxed{", "}"), (r"$\boxed{", "}$"),
    (r"The final answer is $\boxed{", "}$."), ("The answer is ", "."), ("So the answer is: **", "**"),
]  # fmt: skip
ANSWERS = ["18", "-5", "1,234", "18.50", "3/4", "−7"]


def byte_level(digits: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, spelled]) if digits else spelled
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=640, special_tokens=["<|eos|>", "<|pad|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )  # fmt: skip
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
    "byte-level, merged digits": lambda: byte_level(None),
    "byte-level, single digits": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "byte-fallback, blank stripped": lambda: _sentencepiece(
        decoders.Sequence([*REPLACE_BLANK, decoders.Strip(" ", 1, 0)])
    ),
    "byte-fallback, blank kept": lambda: _sentencepiece(decoders.Sequence(REPLACE_BLANK)),
    "metaspace": lambda: _sentencepiece(decoders.Metaspace()),
    "word pieces": _word_pieces,
}
FAST = [name for name in BACKENDS if name.startswith("byte-")]  # families that can spell any text
TOKENIZERS = [*BACKENDS, "characters"]


def wrap(backend: Tokenizer, cls: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer = cls(tokenizer_object=backend, eos_token="<|eos|>", pad_token="<|pad|>", unk_token=None)
    tokenizer.add_tokens(["<think>", "日本 語"])  # ordinary added tokens: they are text
    return tokenizer


@functools.cache
def get_tokenizer(name: str) -> PreTrainedTokenizerBase:
    if name == "characters":
        return CharacterTokenizer(eos_token="<|eos|>", pad_token="<|pad|>", unk_token="<unk>")
    tokenizer = wrap(BACKENDS[name]())
    tokenizer.clean_up_tokenization_spaces = True
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# Of each script and kind a few, by ranges: the table of all characters takes Hypothesis seconds to build.
CHARACTERS = "".join(
    map(chr, [*range(0x250), *range(0x2000, 0x2070), *range(0x0660, 0x066A), *range(0x3000, 0x3040), 0x301, 0x1F986])
)


def snippets(max_size: int) -> st.SearchStrategy[str]:
    return st.text(CHARACTERS, max_size=max_size)


# Ids as a model may sample them: text, broken multi-byte characters, specials, anything.
SNIPPETS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), snippets(6)), max_size=12).map("".join)


def completions(name: str) -> st.SearchStrategy[list[int]]:
    tokenizer = get_tokenizer(name)
    noise = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    answers = st.tuples(st.sampled_from(MARKERS), st.sampled_from(ANSWERS)).map(lambda m: m[0][0] + m[1] + m[0][1])
    parts = st.lists(st.one_of(SNIPPETS.map(lambda text: encode(tokenizer, text)), noise), max_size=4)
    ends = st.one_of(st.just(""), answers, answers.map(lambda text: text + text)).map(
        lambda text: encode(tokenizer, text)
    )
    return st.tuples(parts, ends, noise | st.just([])).map(lambda p: [*itertools.chain(*p[0]), *p[1], *p[2]])


def gsm8k_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
