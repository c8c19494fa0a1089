"""From sampled token ids to the answer and the reasoning spans of one completion.

First stop after the rollouts: scoring masks the spans found here and asks how the answer's probability moves.
Character positions come from the sampled ids themselves and nothing is ever re-tokenised, so every span is
made of whole sampled tokens.
"""

from __future__ import annotations

import json
import operator
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"

Interval = tuple[int, int]
Detector = Callable[[str], Iterable[Interval]]


class Span(NamedTuple):
    """Tokens ``[start, end)`` of one completion."""

    start: int
    end: int


class TokenOffsets(NamedTuple):
    """The text of a completion and the characters ``text[starts[t]:ends[t]]`` that token ``t`` helps to spell.

    ``starts`` and ``ends`` are (T,) int64, both non-decreasing. Tokens that share a multi-byte character both
    hold it, so neighbouring intervals may overlap by one. A token without text of its own (EOS, padding) has an
    empty interval, or the character that it interrupts.
    """

    text: str
    starts: np.ndarray
    ends: np.ndarray

    def span(self, start: int, end: int) -> Span:
        """Widen the characters ``[start, end)`` to the whole tokens that touch them."""
        return Span(int(self.ends.searchsorted(start, "right")), int(self.starts.searchsorted(end, "left")))


# --- Numbers and arithmetic, as models write them -----------------------------------------------------------
# Every repetition is bounded or cannot overlap itself, so that matching is linear in whatever a model emits.

_BLANK = r"[^\S\n]"
_GROUP = r"\{(?:[^{}\n]|\{[^{}\n]{0,60}\}){1,60}\}"
_DIGITS = (
    r"(?:\d{1,2}(?:,\d\d){1,4},\d{3}(?!\d)"  # 12,34,567
    r"|\d{1,3}(?:[ \u00a0\u202f]\d{3}){1,4}(?![\d,])"  # 12 345
    r"|\d+(?:(?:,|\{,\}|\\,)\d{3}(?!\d)){0,9}(?:\.\d+)?|\.\d+)"
)
_FRACTION = rf"\\[dtc]?frac\s?{_GROUP}\s?{_GROUP}"
_MINUS = r"\-−–－"  # for use inside [...]
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
_ANNOTATION = r"<<[^<>\n]{0,200}>>"
_EQUALS = r"(?:&?==?(?!>)&?|[≈≅≤≥]|\\(?:approx|leq?|geq?)(?![a-zA-Z]))"

_BEFORE_NUMBER = r"(?=\s{1,4}[\d$(\\.])"
_WORD_OPERATOR = rf"(?:plus|minus|times|divided|multiplied|equals|is equal|of(?: the)?{_BEFORE_NUMBER})"
_WORD = r"(?:[^\W\d_]{2,}(?:['’/-][^\W\d_]+){0,4}|[aAI](?= [^\W\d_]{2}))"

# One letter per kind of lexeme, so that an expression is a short regular expression over a string of kinds. They are
# grouped by first character, tried in order: most of a text is words and numbers, and this decides the speed.
_LEXEMES = {
    r"(?=[^\W\d_])": [
        ("O", rf"(?:plus|minus|times|divided by|multiplied by){_BEFORE_NUMBER}"),
        ("o", rf"of(?: the)?{_BEFORE_NUMBER}"),
        ("E", rf"(?:equals|is equal to){_BEFORE_NUMBER}"),
        ("W", rf"{_WORD}(?: (?!{_WORD_OPERATOR}){_WORD}){{0,5}}"),
        ("O", r"(?<=[\d\s)}%$])[xX](?=\s?[\d$(\\.])"),
        ("v", r"(?<=\d)[a-zA-Z](?![\w'’])"),  # a variable's coefficient stands before it
        ("V", r"[a-zA-Z](?:_\{?\w{1,3}\}?)?(?![\w'’])"),
    ],
    r"(?=[\d.\\])": [("N", rf"{_DIGITS}|{_FRACTION}")],
    "": [
        ("A", _ANNOTATION),
        ("E", _EQUALS),
        ("S", r"\*\*"),  # emphasis or a power
        ("O", r"[+*×·⋅∙÷^]|/(?=\s)|\\(?:times|cdot|div|pm)(?![a-zA-Z])"),
        ("M", rf"[{_MINUS}](?=\s)"),
        ("m", rf"[{_MINUS}]"),  # a tight minus: a sign, a difference or a range
        ("W", r"(?<=[\w)])/[^\W\d_]+"),
        ("d", r"/"),
        ("U", _CURRENCY),
        ("P", r"[(\[{~]|\\[(\[{]|\\left\s?[(\[]"),
        ("C", r"[)\]}%°¢²³]|\\[)\]}%]|\\right\s?[)\]]"),
        ("T", rf"\\(?:text|mathrm|mbox)\s?{_GROUP}"),
        ("L", r"\n"),
        ("B", r"\S"),
    ],
}
_LEXEME = re.compile(
    rf"{_BLANK}*(?:%s)"
    % "|".join(f"{guard}(?:{'|'.join(f'({pattern})' for _, pattern in group)})" for guard, group in _LEXEMES.items())
)
_KINDS = ["", *(kind for group in _LEXEMES.values() for kind, _ in group)]

# Words belong to an operand only if an operator follows: "16 eggs - 3 eggs = 13", but not "13 eggs left".
_OPERAND = r"[PUSm]{0,8}(?:A[Um]{0,2}N|[NAV])v?[CUS]{0,8}(?:(?:WT?|T)(?=L?[OMmdoE]))?"
_EXPRESSION = re.compile(rf"{_OPERAND}(?:(?:[OMmdoS]|L?E){_OPERAND})+E?|A(?:[Um]{{0,2}}N)?")
_CLEARLY_ARITHMETIC = re.compile("[EAOM]|(?:[md].*){2}")


def _arithmetic_intervals(text: str) -> list[Interval]:
    """Expressions in order; not a bare fraction or range, nor letters that merely stand beside a sign."""
    lexemes = list(_LEXEME.finditer(text))
    kinds = "".join([_KINDS[lexeme.lastindex or 0] for lexeme in lexemes])
    intervals = []
    for expression in _EXPRESSION.finditer(kinds):
        first, last = lexemes[expression.start()], lexemes[expression.end() - 1]
        start, end = first.start(first.lastindex or 0), last.end()
        if _CLEARLY_ARITHMETIC.search(expression.group()) and re.search(r"\d", text[start:end]):
            intervals.append((start, end))
    return intervals


# --- The answer -----------------------------------------------------------------------------------------------

_HASHES = re.compile(rf"#{{4,}}{_BLANK}*\n?")
_ANSWER_IS = (
    r"(?i:\b(?:(?:so|thus|therefore|hence),?\s)?(?:(?:the|our|my)\s)?(?:(?:final|correct)\s)?answer\s{1,3}is\b)"
)
_ANSWER_PHRASE = re.compile(_ANSWER_IS)
_ANSWER_PHRASE_AT_END = re.compile(rf"{_ANSWER_IS}\W{{0,12}}\Z")
_BRACE = re.compile(r"\\boxed\s{0,3}\{|\\.|[{}]", re.DOTALL)
_HEADING = re.compile(rf"[.)]{_BLANK}+[^\W\d_]")

_LEAD = (
    rf"(?:{_ANNOTATION}|{_BLANK}|{_CURRENCY}|[*_`~≈=:(\[{{<\"'“‘]|\\[(\[,;!]|\\approx"
    r"|\\(?:boxed|text|textbf|mathbf|mathrm)\s?\{|(?i:the|final|answer|is|a)\b|[^\W\d]\w{0,30}\s?=){0,30}"
)
_VALUE = (
    rf"(?:[+{_MINUS}]{_BLANK}?(?:{_CURRENCY}{_BLANK}?)?)?"
    rf"(?:\d+{_BLANK}\d+/\d+|{_DIGITS}(?:{_BLANK}?/{_BLANK}?{_DIGITS})?|{_FRACTION})"
)
_SUM = rf"{_VALUE}(?:{_BLANK}?(?:[+*×·⋅÷/^xX{_MINUS}]|\\(?:times|cdot|div)){_BLANK}?{_CURRENCY}?{_VALUE}){{0,20}}"
_LEAD_AND_VALUE = re.compile(rf"{_LEAD}(?P<value>{_SUM})")
_EQUALS_VALUE = re.compile(rf"{_BLANK}?{_EQUALS}{_LEAD}(?P<value>{_SUM})")
_VALUE_IN_SENTENCE = re.compile(rf"[^\n.!?]{{0,60}}?(?<![\w.,])(?P<value>{_SUM})")
_UNITS_ONLY = re.compile(
    rf"(?:[\s*_.,;:!)\]}}°¢\"'”’]|{_CURRENCY}|\\?%|\\[,;!)\]]|\^\{{?\\circ\}}?|\\(?:text|mathrm|mbox)\s?{_GROUP}"
    r"|/?(?<![^\W\d_])[^\W\d_]{2,}(?![^\W\d_])){0,60}"
)


class _Answer(NamedTuple):
    """Characters of an answer and of the marker before it: ``marker <= start < end``."""

    marker: int
    start: int
    end: int


def _value_after(pattern: re.Pattern[str], text: str, position: int, limit: int) -> Interval | None:
    """Find the value that ``pattern`` announces at ``position``; of a chain ``3 * 6 = 18``, its last member."""
    match = pattern.match(text, position, limit)
    found = None
    while match:
        found = match.span("value")
        match = _EQUALS_VALUE.match(text, found[1], limit)
    return found


def _hashes_answer(text: str, boxed: _Answer | None) -> _Answer | None:
    for marker in reversed(list(_HASHES.finditer(text))):
        value = _value_after(_LEAD_AND_VALUE, text, marker.end(), len(text))
        if value is None:
            continue
        # "#### 2. Add the tips" above a boxed result is a Markdown heading.
        if boxed and boxed.marker > value[1] and _HEADING.match(text, value[1]):
            continue
        return _Answer(marker.start(), *value)
    return None


def _boxed_answer(text: str) -> _Answer | None:
    boxes: list[tuple[int, int, int]] = []
    open_braces: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace.group().endswith("{") and brace.group() != r"\{":
            open_braces.append(brace)
        elif brace.group() == "}" and open_braces:
            opening = open_braces.pop()
            if opening.group() != "{":
                boxes.append((opening.start(), opening.end(), brace.start()))
    for marker, start, end in reversed(boxes):
        content = text[start:end]
        if not content.strip():
            continue
        value = _value_after(_LEAD_AND_VALUE, text, start, end)
        if value is None or not _UNITS_ONLY.fullmatch(text, value[1], end):
            value = start + len(content) - len(content.lstrip()), start + len(content.rstrip())
        return _Answer(marker, *value)
    return None


def _phrase_answer(text: str) -> _Answer | None:
    for phrase in reversed(list(_ANSWER_PHRASE.finditer(text))):
        for pattern in (_LEAD_AND_VALUE, _VALUE_IN_SENTENCE):
            value = _value_after(pattern, text, phrase.end(), len(text))
            if value:
                return _Answer(phrase.start(), *value)
    return None


def _locate_answer(text: str) -> _Answer | None:
    boxed = _boxed_answer(text) if r"\boxed" in text else None
    answer = _hashes_answer(text, boxed) or boxed or _phrase_answer(text)
    if answer is None:
        return None
    # "The answer is $\boxed{18}$": the words and the delimiter announce the answer as much as the box does.
    head = text[: answer.marker].rstrip(" \t\n*_$([{\\")
    tail = max(0, len(head) - 60)
    phrase = _ANSWER_PHRASE_AT_END.search(head, tail) if "answer" in head[tail:].lower() else None
    marker = phrase.start() if phrase else len(head)
    marker += len(text[marker : answer.marker]) - len(text[marker : answer.marker].lstrip())
    return answer._replace(marker=marker)


def answer_text_span(text: str) -> Interval | None:
    r"""Characters of the final answer in a completion's text, right or wrong; ``None`` where there is none.

    In this order: the number after the last ``####`` that a number follows; else inside the last non-empty
    balanced ``\boxed{}``; else after the last "answer is" that a number follows in its sentence. Currency signs,
    emphasis, ``\boxed``, brackets and "the answer is" may stand between marker and number and are not part of
    it. The number may carry a sign (ASCII, Unicode minus or en dash, also before the currency sign: ``-$5``),
    thousands separators, decimals (``18.00``, but not the full stop of ``18.``) and may be a fraction. Of a
    chain ``3 * 6 = 18`` the answer is its last member; a sum without result (``36+36``) is returned whole, so
    that it does not pass for a number. A box that holds anything but one number with its units is returned
    whole without outer blanks.

    Args:
        text: decoded completion.

    Returns:
        Half-open character interval, never empty.

    Source: the settled rule on answer tokens in the method notes, item 1.
    """
    answer = _locate_answer(text)
    return None if answer is None else (answer.start, answer.end)


# --- Detectors: text to candidate intervals, most wanted first -------------------------------------------------

_SENTENCE_END = re.compile(r"\n|[.!?…]{1,6}[\"'”’)\]*_]{0,4}(?=\s|\Z)|[。！？][”’」』）]{0,4}")
_NO_SENTENCE_END = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|approx|e\.g|i\.e)|(?:^|\n|[.!?]\s)\s?\d{1,3})\Z")


def sentence_intervals(text: str) -> list[Interval]:
    """Sentences and lines in order of position, without outer blanks; those without letter or digit are left out.

    A sentence ends at a line break, at ``. ! ?`` before a blank, or at their CJK forms; not after a title
    ("Mr."), nor after the number of a list item.
    """
    ends = [
        end.end()
        for end in _SENTENCE_END.finditer(text)
        if end.group() != "." or not _NO_SENTENCE_END.search(text, max(0, end.start() - 8), end.start())
    ]
    intervals = []
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        sentence = text[start:end]
        if re.search(r"[^\W_]", sentence):
            intervals.append((start + len(sentence) - len(sentence.lstrip()), start + len(sentence.rstrip())))
    return intervals


def math_intervals(text: str) -> list[Interval]:
    r"""Arithmetic expressions in order of position, then the sentences that overlap none of them, likewise.

    An expression is a chain of operands joined by operators and equals signs, as in ``$9 * 2 = $<<9*2=18>>18``,
    ``\frac{1}{6} \times 36 = 6`` or ``16 eggs - 3 eggs = 13``. A lone fraction (``1/2``), a range (``3-4``)
    and anything without a digit are not expressions.
    """
    arithmetic = _arithmetic_intervals(text)
    sentences = []
    following = iter([*arithmetic, (len(text), len(text))])
    start, end = next(following)
    for sentence in sentence_intervals(text):
        while end <= sentence[0] and end < len(text):
            start, end = next(following)
        if start >= sentence[1] or end <= sentence[0]:
            sentences.append(sentence)
    return arithmetic + sentences


DETECTORS: dict[str, Detector] = {"math": math_intervals, "sentence": sentence_intervals}
SELECTIONS: tuple[str, ...] = ("first", "longest")


# --- Token ids to characters -----------------------------------------------------------------------------------


def _byte_of_character() -> dict[str, int]:
    """Invert byte-level BPE's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
_FALLBACK_BYTE = re.compile(r"<0x([0-9a-fA-F]{2})>")
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_ONE_BLANK = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _token(i: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Look up an id in a fast tokenizer, whose ids are unsigned 32-bit; ``None`` for one that it does not have."""
    return cast("str | None", tokenizer.convert_ids_to_tokens(i)) if 0 <= i < 2**32 else None


class _Vocabulary:
    """What decoding with one tokenizer needs, learnt once per id: text-free ids, and bytes where they are fixed.

    ``style`` says how ids become text. "byte_level": each id is a fixed byte string, the text is their UTF-8
    reading (GPT-2, Qwen, Llama 3). "byte_fallback": the same, as long as the bytes are valid UTF-8 (Llama 2,
    Mistral, Gemma). "opaque": only the tokenizer's own ``decode`` can tell.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self.pieces: dict[int, bytes] = {}
        self.strips_blank = False
        self.style = "opaque"
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # A tokenizer without a fast backend may answer any id with its unknown token: ask its vocabulary.
        self.known = None if backend is not None else {*tokenizer.get_vocab().values(), *added}
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            return
        state = json.loads(decoder.__getstate__())
        steps = state.get("decoders", [])
        if state["type"] == "ByteLevel":
            self.style = "byte_level"
        elif steps[:3] == _SENTENCEPIECE and steps[3:] in ([], [_STRIP_ONE_BLANK]):
            self.style, self.strips_blank = "byte_fallback", len(steps) == 4
        if self.style != "opaque" and not self._agrees_with(tokenizer):
            self.style = "opaque"
            self.pieces.clear()

    def _agrees_with(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Check the bytes against the tokenizer's own decoding, which a subclass may have changed."""
        probe = [
            i
            for i in range(0, len(tokenizer), max(1, len(tokenizer) // 500))
            if (token := _token(i, tokenizer)) is not None and not _FALLBACK_BYTE.fullmatch(token)
        ]
        return self.offsets(probe, tokenizer).text == self.decode(probe, tokenizer)

    def decode(self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
        kept = [i for i in ids if i not in self.special]
        text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def offsets(self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> TokenOffsets:
        try:
            pieces = list(map(self.pieces.__getitem__, ids))
        except KeyError:
            pieces = [self._piece(i, position, tokenizer) for position, i in enumerate(ids)]
        if self.style == "opaque":
            return _incremental_offsets(ids, self.special, lambda part: self.decode(part, tokenizer))
        offsets = _byte_offsets(pieces, self.strips_blank)
        if self.style == "byte_fallback" and REPLACEMENT in offsets.text:
            # Fallback bytes that are no UTF-8 are replaced run by run, which the tokenizer alone can redo.
            return _incremental_offsets(ids, self.special, lambda part: self.decode(part, tokenizer))
        return offsets

    def _piece(self, i: int, position: int, tokenizer: PreTrainedTokenizerBase) -> bytes:
        if i in self.pieces:
            return self.pieces[i]
        token = _token(i, tokenizer) if self.known is None else "" if i in self.known else None
        if token is None:
            raise ValueError(
                f"token_ids[{position}] is {i}, outside the tokenizer's vocabulary of {len(tokenizer)} ids"
            )
        self.pieces[i] = b"" if i in self.special or self.style == "opaque" else self._bytes(token)
        return self.pieces[i]

    def _bytes(self, token: str) -> bytes:
        if self.style == "byte_fallback":
            if byte := _FALLBACK_BYTE.fullmatch(token):
                return bytes([int(byte[1], 16)])
            return token.replace("▁", " ").encode()
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:  # an added token, kept as it is written
            return token.encode()


def _byte_offsets(pieces: list[bytes], strips_blank: bool) -> TokenOffsets:
    """Offsets of tokens that are fixed byte strings; ``strips_blank`` drops one blank before the text."""
    data = b"".join(pieces)
    bounds = np.fromiter(accumulate(map(len, pieces), initial=0), np.int64, len(pieces) + 1)
    if strips_blank and data.startswith(b" "):
        data = data[1:]
        bounds = np.maximum(bounds - 1, 0)
    text = data.decode("utf-8", "replace")
    if len(text) == len(data):
        return TokenOffsets(text, bounds[:-1], bounds[1:])
    opens = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
    if REPLACEMENT in text:
        for start, end in _invalid_utf8(data):
            opens[start:end] = False
            opens[start] = True
    opened = np.concatenate([[0], np.cumsum(opens)])  # characters that begin before each byte
    starts, ends = opened[bounds[:-1]], opened[bounds[1:]]
    # A token that begins inside a character holds it too, unless it is a replacement character, whose later
    # bytes show in no decoding of a prefix.
    shared = np.flatnonzero(~np.append(opens, True)[bounds[:-1]])
    starts[[t for t in shared if text[starts[t] - 1] != REPLACEMENT]] -= 1
    return TokenOffsets(text, starts, ends)


def _invalid_utf8(data: bytes) -> Iterator[Interval]:
    """Byte intervals that decoding replaces by one replacement character each."""
    view, position = memoryview(data), 0
    while position < len(data):
        try:
            str(view[position:], "utf-8")
            return
        except UnicodeDecodeError as error:
            yield position + error.start, position + error.end
            position += error.end


def _prefix_texts(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str], windowed: bool
) -> Iterator[tuple[int, str]]:
    """Yield, for each prefix of ``ids``, how many characters were settled before it and the text from there on.

    With ``windowed`` only the tokens since the last two settled points are decoded, which is linear in the
    length; without, each prefix is decoded whole.
    """
    settled, context, read = 0, 0, 0
    lead = ""
    for n in range(1, len(ids) + 1):
        tail = decode(ids[context:n])[len(lead) :]
        yield settled, tail
        if windowed and tail and not tail.endswith(REPLACEMENT):
            settled += len(tail)
            context, read = read, n
            lead = decode(ids[context:read])


def _incremental_offsets(ids: Sequence[int], special: set[int], decode: Callable[[Sequence[int]], str]) -> TokenOffsets:
    """Offsets by incremental decoding, for any tokenizer: a token holds what its arrival adds to the text.

    While a multi-byte character is incomplete its tokens all hold it. A character that stays unreadable belongs
    to the first token that shows it.
    """
    kept = [i for i in ids if i not in special]
    text = decode(kept)
    for windowed in (True, False):
        prefixes = list(_prefix_texts(kept, decode, windowed))
        rebuilt = ""
        for settled, tail in prefixes:
            rebuilt = rebuilt[:settled] + tail
        if rebuilt == text:
            break
    # Prefixes 0 to n: characters that stay as they are, and characters begun. An incomplete run of fallback bytes
    # may blot out text that stood before and will stand again, so neither goes back.
    agreed, reached = [0], [0]
    for settled, tail in prefixes:
        same = accumulate((a == b for a, b in zip(tail, text[settled:], strict=False)), operator.and_)
        agreed.append(max(agreed[-1], settled + sum(same)))
        begun = agreed[-1] + (settled + len(tail) > agreed[-1])
        reached.append(max(reached[-1], min(begun, len(text))))
    after = list(accumulate((i not in special for i in ids), initial=0))  # which prefix each token extends
    starts, ends = [agreed[n] for n in after[:-1]], [reached[n] for n in after[1:]]
    return TokenOffsets(text, np.array(starts, np.int64), np.array(ends, np.int64))


# Per tokenizer, with its size and special ids when the entry was made: added tokens make it stale.
_VOCABULARIES: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], _Vocabulary]] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> _Vocabulary:
    stamp = (len(tokenizer), *tokenizer.all_special_ids)
    entry = _VOCABULARIES.get(tokenizer)
    if entry is None or entry[0] != stamp:
        entry = _VOCABULARIES[tokenizer] = (stamp, _Vocabulary(tokenizer))
    return entry[1]


def _as_ids(token_ids: Sequence[int] | torch.Tensor) -> list[int]:
    if isinstance(token_ids, torch.Tensor):
        if token_ids.ndim != 1:
            raise ValueError(f"token_ids must be 1-D, got a tensor of shape {tuple(token_ids.shape)}")
        if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
            raise TypeError(f"token_ids must be integers, got a tensor of {token_ids.dtype}")
        return token_ids.tolist()
    ids = list(token_ids)
    if set(map(type, ids)) <= {int}:
        return ids
    for position, i in enumerate(ids):
        if isinstance(i, bool) or not hasattr(i, "__index__"):
            raise TypeError(f"token_ids[{position}] must be an integer, got {i!r}")
    return [operator.index(i) for i in ids]


def token_offsets(token_ids: Sequence[int] | torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> TokenOffsets:
    """Decode a completion and tell which characters each sampled token spells.

    The text is the tokenizer's decoding of the ids without special tokens and without clean-up of blanks. The
    offsets are those of incremental decoding: token t holds the characters that its arrival completes or
    begins. For byte-level and byte-fallback tokenizers they are computed from the tokens' bytes in one pass,
    with no decode call.

    Bytes that are no UTF-8 decode to U+FFFD. Such a character belongs to the token that begins it; a token that
    only continues it has an empty interval.

    Args:
        token_ids: (T,) sampled ids, a sequence of ints or an integer tensor; T may be 0.
        tokenizer: a transformers tokenizer.

    Raises:
        TypeError: ids that are no integers.
        ValueError: ids that are not 1-D, or outside the tokenizer's vocabulary.

    Source: the settled rule on token boundaries in the method notes, item 2.
    """
    return _vocabulary(tokenizer).offsets(_as_ids(token_ids), tokenizer)


# --- Token ids to spans ----------------------------------------------------------------------------------------


def find_answer(token_ids: Sequence[int] | torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> Span | None:
    """Find the answer a completion gives, right or wrong: every token that touches ``answer_text_span``.

    Args:
        token_ids: (T,) sampled ids, a sequence of ints or an integer tensor; T may be 0.
        tokenizer: a transformers tokenizer.

    Returns:
        A non-empty span of completion tokens, or ``None`` when there is no answer.

    Raises:
        TypeError, ValueError: as ``token_offsets``.
    """
    offsets = token_offsets(token_ids, tokenizer)
    answer = answer_text_span(offsets.text)
    return None if answer is None else offsets.span(*answer)


def detect_spans(
    token_ids: Sequence[int] | torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer: Span | None = None,
    detector: str | Detector = "math",
    max_spans: int = 10,
    selection: str = "first",
) -> list[Span]:
    """Find the reasoning spans of a completion that counterfactual scoring masks one at a time.

    Spans lie before the answer's marker (``####``, ``\\boxed{``, "the answer is"), or anywhere when there is no
    answer. A detector's intervals are widened to whole tokens in the detector's order; a token that an earlier
    interval or the marker holds is cut from a later one, which is dropped if no letter or digit remains or if
    an earlier one lies inside it.

    Args:
        token_ids: (T,) sampled ids, a sequence of ints or an integer tensor; T may be 0.
        tokenizer: a transformers tokenizer.
        answer: the answer's tokens; ``None`` means ``find_answer`` is asked.
        detector: "math" (arithmetic, then sentences that overlap none of it), "sentence", or a function from the
            text before the marker to half-open character intervals, most wanted first.
        max_spans: the most spans returned, at least 1.
        selection: which spans stay when there are more: "first" in the detector's order, so that "math" prefers
            arithmetic, or "longest" in tokens, the earlier of equals.

    Returns:
        Disjoint non-empty spans in order of position.

    Raises:
        TypeError: ids or ``max_spans`` that are no integers, a ``detector`` that is neither name nor function.
        ValueError: as ``token_offsets``; an unknown ``detector`` or ``selection``; ``max_spans`` below 1; an
            ``answer`` or an interval of the detector that is empty or outside the completion.

    Source: "Beyond Uniform Credit", section 3; the settled rule on spans in the method notes, item 3.
    """
    find_intervals = _resolve_detector(detector)
    if selection not in SELECTIONS:
        raise ValueError(f"selection must be one of {', '.join(SELECTIONS)}, got {selection!r}")
    if isinstance(max_spans, bool) or not isinstance(max_spans, int):
        raise TypeError(f"max_spans must be an integer, got {max_spans!r}")
    if max_spans < 1:
        raise ValueError(f"max_spans must be at least 1, got {max_spans}")
    offsets = token_offsets(token_ids, tokenizer)
    limit, token_limit = _reasoning_end(offsets, answer)
    intervals = _checked_intervals(find_intervals, offsets.text[:limit])
    spans = _disjoint_spans(offsets, intervals, token_limit)
    if selection == "longest":
        spans.sort(key=lambda span: (span.start - span.end, span.start))
    return sorted(spans[:max_spans])


def _resolve_detector(detector: str | Detector) -> Detector:
    if callable(detector):
        return detector
    if not isinstance(detector, str):
        raise TypeError(f"detector must be a name or a function, got {detector!r}")
    if detector not in DETECTORS:
        raise ValueError(f"detector must be a function or one of {', '.join(DETECTORS)}, got {detector!r}")
    return DETECTORS[detector]


def _reasoning_end(offsets: TokenOffsets, answer: Span | None) -> tuple[int, int]:
    """Find where the reasoning ends, in characters and in tokens: at the answer's marker."""
    length = len(offsets.starts)
    located = _locate_answer(offsets.text)
    if answer is None:
        limit, token_limit = len(offsets.text), length
    else:
        start, end = answer
        if not 0 <= start < end <= length:
            raise ValueError(f"answer must be a non-empty span inside the {length} tokens, got [{start}, {end})")
        limit, token_limit = int(offsets.starts[start]), start
        if located and not (limit < located.end and located.start < offsets.ends[end - 1]):
            located = None  # the caller's answer is another than the one marked in the text
    if located:
        limit = min(limit, located.marker)
        token_limit = min(token_limit, offsets.span(located.marker, located.end).start)
    return limit, token_limit


def _checked_intervals(find_intervals: Detector, text: str) -> list[Interval]:
    intervals = list(find_intervals(text))
    for index, (start, end) in enumerate(intervals):
        if not 0 <= start < end <= len(text):
            raise ValueError(
                f"detector's interval {index} is [{start}, {end}): empty, reversed or outside the {len(text)} "
                "characters of reasoning"
            )
    return intervals


def _disjoint_spans(offsets: TokenOffsets, intervals: list[Interval], token_limit: int) -> list[Span]:
    """Widen intervals to whole tokens in the given order, each token to the first interval that wants it."""
    taken = bytearray(token_limit)
    spans = []
    for interval in intervals:
        wide = offsets.span(*interval)
        start, end = wide.start, min(wide.end, token_limit)
        while start < end and taken[start]:
            start += 1
        while start < end and taken[end - 1]:
            end -= 1
        if start >= end or taken.find(1, start, end) >= 0:
            continue
        if (start, end) != wide:
            rest = offsets.text[offsets.starts[start] : offsets.ends[end - 1]]
            if not re.search(r"[^\W_]", rest):
                continue
        taken[start:end] = b"\1" * (end - start)
        spans.append(Span(start, end))
    return spans
