"""Decode sampled token ids, and find the characters that each token spells; nothing is tokenised again."""

import itertools
import json
import operator
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
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
        bounds = np.array(intervals, np.int64).reshape(-1, 2)
        first, after = self.ends.searchsorted(bounds[:, 0], "right"), self.starts.searchsorted(bounds[:, 1])
        return list(zip(first.tolist(), after.tolist(), strict=True))


_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}  # byte-level BPE's alphabet
_FALLBACK_BYTE = re.compile(r"<0x([0-9a-fA-F]{2})>")
_SENTENCEPIECE = ["Replace", "ByteFallback", "Fuse"]  # "Strip" of one blank may follow


class Decoder:
    """A tokenizer, and what is known of its ids as it is now.

    Byte-level (GPT-2, Qwen, Llama 3): each id is a fixed byte string, the text is their UTF-8 reading. Byte-fallback
    (Llama 2, Mistral, Gemma): the same, but each byte of a run that is not UTF-8 is a replacement character. Of other
    tokenizers only `decode` can tell.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = weakref.ref(tokenizer)
        added: Any = getattr(tokenizer, "added_tokens_decoder", None)
        added = added if isinstance(added, Mapping) else {}  # mistral-common's tokenizers have a method that raises
        self._tokens = {i: token for token, i in tokenizer.get_vocab().items()}
        self._tokens |= {i: str(token) for i, token in added.items()}
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._special = {i: self._tokens.get(i, "") for i in special}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = json.loads(decoder.__getstate__()) if decoder else {}
        steps = [step["type"] for step in state.get("decoders", [])]
        self._strips_blank = steps[3:] == ["Strip"]
        has_fallback = steps in (_SENTENCEPIECE, [*_SENTENCEPIECE, "Strip"])
        self._fallback = {i for i, token in self._tokens.items() if has_fallback and _FALLBACK_BYTE.fullmatch(token)}
        self._has_bytes = has_fallback or state.get("type") == "ByteLevel"
        self._pieces = {i: b"" if i in special else _bytes_of(token, has_fallback) for i, token in self._tokens.items()}
        # A subclass may decode in its own way.
        probe = sorted(self._tokens.keys() - self._fallback - special)[:: max(1, len(self._tokens) // 500)]
        self._has_bytes = self._has_bytes and self.offsets(probe).text == self._decoded(probe, {})

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Decoder":
        """Look up what is known of a tokenizer; it is asked again once it has other tokens."""
        stamp = (len(tokenizer), *tokenizer.all_special_ids)
        entry = _DECODERS.get(tokenizer)
        if entry is None or entry[0] != stamp:
            entry = _DECODERS[tokenizer] = (stamp, cls(tokenizer))
        return entry[1]

    def knows(self, i: int) -> bool:
        """Tell whether an id is a token of the tokenizer; models may have more output rows than it has tokens."""
        if i in self._tokens or self._has_bytes:
            return i in self._tokens
        try:
            return bool(self._tokenizer().decode([i]))  # type: ignore[union-attr]
        except Exception:  # each tokenizer raises what it likes
            return False

    def offsets(self, ids: list[int], shown: Set[str] = frozenset(), *, ends_shown: bool = True) -> TokenOffsets:
        """Decode a completion as `token_offsets` does."""
        spelled = {i: self._special[i] for i in self._special.keys() & {*ids} if self._special[i] in shown}
        silent = {i for i in {*ids} if i in self._special or not self.knows(i)}
        ending = {i for i in silent if spelled.get(i) != _CLOSER}
        count = 0 if ends_shown or not shown else len([*itertools.takewhile(ending.__contains__, reversed(ids))])
        read = self._offsets_of_bytes if self._has_bytes else self._offsets_by_decoding
        text, starts, ends = read(ids[: len(ids) - count], spelled, silent.difference(spelled))
        none = np.full(count, len(text))
        return TokenOffsets(text, np.append(starts, none), np.append(ends, none))

    def _decoded(self, ids: Sequence[int], spelled: Mapping[int, str]) -> str:
        decode: Any = self._tokenizer().decode  # type: ignore[union-attr]
        # mistral-common's tokenizers decode to pieces ("▁She") unless special tokens are skipped.
        return "".join(
            name * len([*run]) if name else decode([*run], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for name, run in itertools.groupby(ids, spelled.get)
        )

    def _offsets_of_bytes(self, ids: list[int], spelled: Mapping[int, str], silent: Set[int]) -> TokenOffsets:
        pieces = [b"" if i in silent else spelled[i].encode() if i in spelled else self._pieces[i] for i in ids]
        if not self._fallback.isdisjoint(ids):
            spoken = [t for t, piece in enumerate(pieces) if piece]
            for is_byte, run in itertools.groupby(spoken, lambda t: ids[t] in self._fallback):
                places = list(run)
                data = b"".join(pieces[t] for t in places)
                if is_byte and data.decode("utf-8", "ignore").encode() != data:
                    for t in places:
                        pieces[t] = REPLACEMENT.encode()
        data, bounds = b"".join(pieces), np.cumsum([0, *map(len, pieces)])
        if self._strips_blank and data.startswith(b" "):
            data, bounds = data[1:], np.maximum(bounds - 1, 0)
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

    def _offsets_by_decoding(self, ids: list[int], spelled: Mapping[int, str], silent: Set[int]) -> TokenOffsets:
        """Decode incrementally: a token holds what it adds to the text."""
        spoken = [i for i in ids if i not in silent]
        text = self._decoded(spoken, spelled)
        # Of prefixes 0 to n: characters that stay as they are, and characters begun. An incomplete run of fallback
        # bytes may hide text that was there before and will be again, so neither count decreases.
        agreed, reached = [0], [0]
        settled, context, read, lead = 0, 0, 0, ""  # only tokens since the last two settled points are decoded
        for n in range(1, len(spoken) + 1):
            tail = self._decoded(spoken[context:n], spelled)[len(lead) :]
            same = itertools.takewhile(bool, map(operator.eq, tail, text[settled:]))
            agreed.append(max(agreed[-1], settled + sum(same)))
            begun = agreed[-1] + (settled + len(tail) > agreed[-1])
            reached.append(max(reached[-1], min(begun, len(text))))
            if tail and not tail.endswith(REPLACEMENT):
                settled += len(tail)
                context, read = read, n
                lead = self._decoded(spoken[context:read], spelled)
        after = list(itertools.accumulate((i not in silent for i in ids), initial=0))  # which prefix each token extends
        starts, ends = [agreed[n] for n in after[:-1]], [reached[n] for n in after[1:]]
        return TokenOffsets(text, np.array(starts, np.int64), np.array(ends, np.int64))


# With the tokenizer's size and special ids when the entry was made: added tokens make it stale.
_DECODERS: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], Decoder]] = weakref.WeakKeyDictionary()


def _bytes_of(token: str, has_fallback: bool) -> bytes:
    if has_fallback:
        byte = _FALLBACK_BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
    is_added = not _BYTE_OF.keys() >= {*token}  # kept as it is written
    return token.encode() if is_added else bytes([_BYTE_OF[character] for character in token])


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


def as_ids(token_ids: Sequence[int] | torch.Tensor) -> list[int]:
    """Read token ids as integers; raises what `token_offsets` does."""
    try:
        ids = list(map(operator.index, getattr(token_ids, "tolist", lambda: token_ids)()))
    except TypeError as error:
        raise TypeError(f"token_ids must be 1-D and integers: {error}") from error
    if ids and (least := min(ids)) < 0:
        raise ValueError(f"token_ids[{ids.index(least)}] is {least}: an id is not negative; take padding off")
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
    return Decoder.of(tokenizer).offsets(as_ids(token_ids), shown, ends_shown=ends_shown)


def decoded(token_ids: Sequence[int] | torch.Tensor, tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    """Decode ids as the tokenizer does, to show them, without those that it has no token for."""
    ids = as_ids(token_ids)
    try:
        return str(tokenizer.decode(ids, **options))
    except Exception:  # some raise an error for an id that is not a token
        return str(tokenizer.decode([*filter(Decoder.of(tokenizer).knows, ids)], **options))


def describe_spare_ids(rows: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Describe the ids of a model with so many output rows that its tokenizer has no token for; None without any."""
    if not (spare := rows - sum(map(Decoder.of(tokenizer).knows, range(rows)))):
        return None
    return f"{spare} of the model's {rows} output rows are not tokens of its tokenizer; if drawn, they have no text"
