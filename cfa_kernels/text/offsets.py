"""Decode sampled token ids, and find the characters that each token spells; nothing is tokenised again."""

import itertools
import json
import operator
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"
_CLOSER = "<|end_of_box|>"  # at the end of a text it is a sign, not an end


class TokenOffsets(NamedTuple):
    """Text of a completion, and the characters `text[starts[t]:ends[t]]` that token `t` helps to spell.

    `starts` and `ends` are (T,) int64, non-decreasing. Tokens that share a multi-byte character all hold it. A token
    without text (EOS, padding, an id that the tokenizer has no token for) has an empty interval, or the
    character that it interrupts.
    """

    text: str
    starts: np.ndarray
    ends: np.ndarray

    def tokens(self, intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Widen each half-open interval of characters to the whole tokens that touch it, half-open as well."""
        if len(intervals) < 2:
            return [(int(self.ends.searchsorted(a, "right")), int(self.starts.searchsorted(b))) for a, b in intervals]
        bounds = np.array(intervals, np.int64)
        first = self.ends.searchsorted(bounds[:, 0], "right")
        after = self.starts.searchsorted(bounds[:, 1], "left")
        return list(zip(first.tolist(), after.tolist(), strict=True))


_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}  # byte-level BPE's alphabet
_FALLBACK_BYTE = re.compile(r"<0x([0-9a-fA-F]{2})>")
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_ONE_BLANK = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class _Vocabulary:
    """Facts about a tokenizer's ids: those without text, and bytes of all if they are fixed.

    `style` "byte_level": each id is a fixed byte string, the text is their UTF-8 reading (GPT-2, Qwen, Llama 3).
    "byte_fallback": the same, but each byte of a run that is not UTF-8 is a replacement character (Llama 2, Mistral,
    Gemma). "opaque": only the tokenizer's own `decode` can tell.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added: Any = getattr(tokenizer, "added_tokens_decoder", None)
        added = added if isinstance(added, Mapping) else {}  # mistral-common's tokenizers have a method that raises
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        tokens = {i: token for token, i in tokenizer.get_vocab().items()}
        tokens |= {i: str(token) for i, token in added.items()}
        self.special = {i: tokens.get(i, "") for i in special}
        self.fallback_bytes = {i for i, token in tokens.items() if _FALLBACK_BYTE.fullmatch(token)}
        self.style, self.strips_blank = _style(tokenizer)
        self.pieces = {i: b"" if i in special else self._bytes(token) for i, token in tokens.items()}
        count = max(self.pieces, default=-1) + 2  # the last for ids that are no token
        self._bytes_of, self._is_silent, self._is_end = np.full(count, b"", object), *np.ones((2, count), bool)
        for i, piece in self.pieces.items():
            self._bytes_of[i], self._is_silent[i] = piece, i in special
            self._is_end[i] = i in special and tokens[i] != _CLOSER
        self._has_text: dict[int, bool] = {}  # of ids that `get_vocab` omits
        # A subclass may decode in its own way.
        probe = sorted(tokens.keys() - self.fallback_bytes)[:: max(1, len(tokens) // 500)]
        probed = [] if self.style == "opaque" else self.offsets([np.array(probe, np.int64)], tokenizer)
        if any(offsets.text != self._decode(probe, tokenizer, {}) for offsets in probed):
            self.style = "opaque"

    def knows(self, i: int, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Tell whether an id is a token of the tokenizer; models may have more output rows than it has tokens."""
        if i in self.pieces or self.style != "opaque":
            return i in self.pieces
        if i not in self._has_text:
            try:
                self._has_text[i] = bool(tokenizer.decode([i]))
            except Exception:  # each tokenizer raises what it likes
                self._has_text[i] = False
        return self._has_text[i]

    def offsets(
        self,
        rows: Sequence[np.ndarray],
        tokenizer: PreTrainedTokenizerBase,
        shown: Set[str] = frozenset(),
        ends_shown: bool = True,
    ) -> list[TokenOffsets]:
        """Compute the offsets of several completions, together if ids have fixed bytes."""
        if self.style == "opaque":
            return [self._opaque_offsets(row.tolist(), tokenizer, shown, ends_shown) for row in rows]
        stops = list(accumulate(map(len, rows)))
        ids = np.concatenate([*rows, np.zeros(0, np.int64)])
        places = np.minimum(ids, len(self._bytes_of) - 1)
        pieces, silent = self._bytes_of[places].tolist(), self._is_silent[places].tobytes()
        ending = self._is_end[places].tobytes()
        for row, stop in zip(rows, stops, strict=True):
            end = stop - len(row) + (len(row) if ends_shown else len(ending[stop - len(row) : stop].rstrip(b"\1")))
            t = silent.find(b"\1", stop - len(row), end) if shown else -1
            while t >= 0:
                name = self.special.get(int(ids[t]), "")
                pieces[t] = name.encode() if name in shown else b""
                t = silent.find(b"\1", t + 1, end)
        data, bounds = b"".join(pieces), _bounds(pieces)
        result = []
        for row, stop in zip(rows, stops, strict=True):
            own = bounds[stop - len(row) : stop + 1]
            offsets = _byte_offsets(data[own[0] : own[-1]], own - own[0], self.strips_blank)
            if self.style == "byte_fallback" and REPLACEMENT in offsets.text:
                replaced = self._with_replacements(row.tolist(), pieces[stop - len(row) : stop])
                offsets = _byte_offsets(b"".join(replaced), _bounds(replaced), self.strips_blank)
            result.append(offsets)
        return result

    def _opaque_offsets(
        self, ids: list[int], tokenizer: PreTrainedTokenizerBase, shown: Set[str], ends_shown: bool
    ) -> TokenOffsets:
        spelled = {i: self.special[i] for i in self.special.keys() & {*ids} if self.special[i] in shown}
        silent = {i for i in ids if i in self.special or not self.knows(i, tokenizer)}
        ending = silent - {i for i, name in spelled.items() if name == _CLOSER}
        count = 0 if ends_shown or not shown else len([*itertools.takewhile(ending.__contains__, reversed(ids))])
        text, starts, ends = _incremental_offsets(
            ids[: len(ids) - count], silent.difference(spelled), lambda part: self._decode(part, tokenizer, spelled)
        )
        none = np.full(count, len(text))
        return TokenOffsets(text, np.concatenate([starts, none]), np.concatenate([ends, none]))

    def _decode(self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, spelled: Mapping[int, str]) -> str:
        parts = []
        for name, run in itertools.groupby(ids, spelled.get):
            same = [i for i in run if i in spelled or i not in self.special]
            parts.append(name * len(same) if name else _text_of(same, tokenizer))
        return "".join(parts)

    def _with_replacements(self, ids: Sequence[int], pieces: list[bytes]) -> list[bytes]:
        spoken = [t for t, piece in enumerate(pieces) if piece]
        for is_byte, run in itertools.groupby(spoken, lambda t: ids[t] in self.fallback_bytes):
            places = list(run)
            data = b"".join(pieces[t] for t in places)
            if is_byte and data.decode("utf-8", "ignore").encode() != data:
                for t in places:
                    pieces[t] = REPLACEMENT.encode()
        return pieces

    def _bytes(self, token: str) -> bytes:
        if self.style == "byte_fallback":
            byte = _FALLBACK_BYTE.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:  # an added token, kept as it is written
            return token.encode()


def _style(tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Read a fast tokenizer's style from its decoder, and whether it strips one blank before the text."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = json.loads(decoder.__getstate__()) if decoder else {}
    steps = state.get("decoders", [])
    if state.get("type") == "ByteLevel":
        return "byte_level", False
    if steps[:3] == _SENTENCEPIECE and steps[3:] in ([], [_STRIP_ONE_BLANK]):
        return "byte_fallback", len(steps) == 4
    return "opaque", False


def _bounds(pieces: list[bytes]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))])


def _byte_offsets(data: bytes, bounds: np.ndarray, strips_blank: bool) -> TokenOffsets:
    """Compute offsets of tokens that are bytes of `data` between `bounds`; `strips_blank` drops a blank before all."""
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


def _invalid_utf8(data: bytes) -> Iterator[tuple[int, int]]:
    """Find the byte intervals that decoding replaces by one replacement character each."""
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
    """Yield, for each prefix of `ids`, how many characters were settled before it and the text from there on.

    With `windowed` only the tokens since the last two settled points are decoded, which is linear in the length.
    """
    settled, context, read, lead = 0, 0, 0, ""
    for n in range(1, len(ids) + 1):
        tail = decode(ids[context:n])[len(lead) :]
        yield settled, tail
        if windowed and tail and not tail.endswith(REPLACEMENT):
            settled += len(tail)
            context, read = read, n
            lead = decode(ids[context:read])


def _incremental_offsets(ids: Sequence[int], silent: set[int], decode: Callable[[Sequence[int]], str]) -> TokenOffsets:
    """Compute offsets by incremental decoding, for any tokenizer: a token holds what it adds to the text."""
    spoken = [i for i in ids if i not in silent]
    text = decode(spoken)
    for windowed in (True, False):
        prefixes = list(_prefix_texts(spoken, decode, windowed))
        rebuilt = ""
        for settled, tail in prefixes:
            rebuilt = rebuilt[:settled] + tail
        if rebuilt == text:
            break
    # Prefixes 0 to n: characters that stay as they are, and characters begun. An incomplete run of fallback bytes
    # may hide text that was there before and will be again, so neither count decreases.
    agreed, reached = [0], [0]
    for settled, tail in prefixes:
        same = accumulate((a == b for a, b in zip(tail, text[settled:], strict=False)), operator.and_)
        agreed.append(max(agreed[-1], settled + sum(same)))
        begun = agreed[-1] + (settled + len(tail) > agreed[-1])
        reached.append(max(reached[-1], min(begun, len(text))))
    after = list(accumulate((i not in silent for i in ids), initial=0))  # which prefix each token extends
    starts, ends = [agreed[n] for n in after[:-1]], [reached[n] for n in after[1:]]
    return TokenOffsets(text, np.array(starts, np.int64), np.array(ends, np.int64))


def _text_of(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    # mistral-common's tokenizers decode to pieces ("▁She") unless special tokens are skipped.
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)) if ids else ""


# Per tokenizer, with its size and special ids when the entry was made: added tokens make it stale.
_VOCABULARIES: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], _Vocabulary]] = weakref.WeakKeyDictionary()


class Decoder(NamedTuple):
    """A tokenizer, and what is known of its ids as it is now: to decode many completions look it up once."""

    tokenizer: PreTrainedTokenizerBase
    vocabulary: _Vocabulary

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase | Decoder") -> "Decoder":
        """Look up what is known of a tokenizer; raises `ValueError` for None."""
        if isinstance(tokenizer, Decoder):
            return tokenizer
        if tokenizer is None:
            raise ValueError("tokenizer must be the one that sampled the ids, got None")
        return cls(tokenizer, _vocabulary(tokenizer))

    def offsets(
        self, rows: Iterable[Sequence[int] | torch.Tensor], shown: Set[str] = frozenset(), *, ends_shown: bool = True
    ) -> list[TokenOffsets]:
        """Decode completions as `token_offsets` does, in a fraction of the time."""
        return self.vocabulary.offsets([*map(_as_ids, rows)], self.tokenizer, shown, ends_shown)


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> _Vocabulary:
    stamp = (len(tokenizer), *tokenizer.all_special_ids)
    entry = _VOCABULARIES.get(tokenizer)
    if entry is None or entry[0] != stamp:
        entry = _VOCABULARIES[tokenizer] = (stamp, _Vocabulary(tokenizer))
    return entry[1]


def _as_ids(token_ids: Sequence[int] | torch.Tensor) -> np.ndarray:
    if isinstance(token_ids, torch.Tensor) and token_ids.dtype == torch.int64 and token_ids.ndim == 1:
        ids = token_ids.cpu().numpy()
    else:
        try:
            ids = np.array(list(map(operator.index, getattr(token_ids, "tolist", lambda: token_ids)())), np.int64)
        except TypeError as error:
            raise TypeError(f"token_ids must be 1-D and integers: {error}") from error
    if len(ids) and ids.min() < 0:
        raise ValueError(f"token_ids[{ids.argmin()}] is {ids.min()}: an id is not negative; take padding off")
    return ids


def token_offsets(
    token_ids: Sequence[int] | torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    shown: Set[str] = frozenset(),
    *,
    ends_shown: bool = True,
) -> TokenOffsets:
    """Decode a completion and find the characters that each sampled token spells.

    The text is the tokenizer's decoding of the (T,) ids without clean-up of blanks and without special tokens, except
    tokens with a name in `shown`; at the end of the text these are dropped too unless `ends_shown`. A token holds the
    characters that its arrival completes or begins; U+FFFD, for bytes that are not UTF-8, belongs to the token that
    begins it. An id that the tokenizer has no token for, as models with more output rows than their tokenizer has
    tokens may draw, has no text. Raises `TypeError` for ids that are not 1-D integers, `ValueError` for negative ones.
    """
    return Decoder.of(tokenizer).offsets([token_ids], shown, ends_shown=ends_shown)[0]


def decoded(token_ids: Sequence[int] | torch.Tensor, tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    """Decode ids as the tokenizer does, to show them, without those that it has no token for."""
    ids = _as_ids(token_ids).tolist()
    try:
        return str(tokenizer.decode(ids, **options))
    except Exception:  # some raise an error for an id that is not a token
        vocabulary = _vocabulary(tokenizer)
        return str(tokenizer.decode([i for i in ids if vocabulary.knows(i, tokenizer)], **options))


def describe_spare_ids(rows: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Describe the ids of a model with so many output rows that its tokenizer has no token for; None without any."""
    vocabulary = _vocabulary(tokenizer)
    if not (spare := sum(not vocabulary.knows(i, tokenizer) for i in range(rows))):
        return None
    return f"{spare} of the model's {rows} output rows are not tokens of its tokenizer; if drawn, they have no text"
