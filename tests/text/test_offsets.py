"""Sampled ids to text and to the characters that each token spells, on small tokenizers of each family."""

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cfa_kernels.text.find import detect_spans, find_answer
from cfa_kernels.text.offsets import _BYTE_OF, decoded, token_offsets
from tests.support.small_tokenizers import (
    CORPUS,
    FAST,
    TOKENIZERS,
    byte_level,
    completions,
    encode,
    get_tokenizer,
    property_test,
    wrap,
)


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


@pytest.mark.parametrize("name", TOKENIZERS)
@property_test
@given(data=st.data())
def test_offsets_are_those_of_decoding_every_prefix(name: str, data: st.DataObject) -> None:
    tokenizer = get_tokenizer(name)
    ids = data.draw(completions(name))
    text, intervals = offsets_by_decoding_every_prefix(ids, tokenizer)
    offsets = token_offsets(ids, tokenizer)
    assert offsets.text == text
    assert (np.diff(offsets.starts) >= 0).all()
    assert (np.diff(offsets.ends) >= 0).all()
    if "fallback" in name and "\ufffd" in text:  # prefixes of a run that is not UTF-8 may show more than the whole
        return
    assert list(zip(offsets.starts.tolist(), offsets.ends.tolist(), strict=True)) == intervals


def test_each_fallback_byte_of_a_run_that_is_not_utf_8_is_a_replacement_character() -> None:
    tokenizer = get_tokenizer("byte-fallback, blank kept")
    tokens = ["<0xE4>", "<0xB8>", "<0xAD>", "<0xE4>", "<|eos|>", "日本 語", "<0xC3>", "<0xA9>"]
    offsets = token_offsets(tokenizer.convert_tokens_to_ids(tokens), tokenizer)
    assert offsets.text == "\ufffd" * 4 + "日本 語é"
    assert offsets.starts.tolist() == [0, 1, 2, 3, 4, 4, 8, 8]
    assert offsets.ends.tolist() == [1, 2, 3, 4, 4, 8, 9, 9]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("data", [b"\x80", b"\xe4\xb8", b"\n\xff", b"\xef\xbf\xbd"])
def test_what_is_no_utf_8_is_read_without_decoding_each_prefix(
    name: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = get_tokenizer(name)
    byte_names = {byte: character for character, byte in _BYTE_OF.items()}
    tokens = [byte_names[b] if "level" in name else f"<0x{b:02X}>" for b in data]
    ids = (tokenizer.convert_tokens_to_ids(tokens) * 20_000)[:20_000]
    expected = offsets_by_decoding_every_prefix(ids[:20], tokenizer)[0]
    token_offsets(ids[:20], tokenizer)
    monkeypatch.setattr(type(tokenizer), "decode", lambda *_, **__: pytest.fail("decoded again"))
    assert token_offsets(ids[:20], tokenizer).text == expected
    assert len(token_offsets(ids, tokenizer).text) >= 20_000 // 3


def test_a_tokenizer_that_decodes_in_its_own_way_is_believed() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: object, **kwargs: object) -> str:
            return super()._decode(*args, **kwargs).upper()

    tokenizer = wrap(byte_level(None), Shouting)
    assert token_offsets(encode(tokenizer, "She has 3 eggs"), tokenizer).text == "SHE HAS 3 EGGS"


@pytest.mark.parametrize("name", TOKENIZERS)
@property_test
@given(data=st.data())
def test_ids_that_are_no_token_have_an_empty_place_wherever_they_are_drawn(name: str, data: st.DataObject) -> None:
    tokenizer = get_tokenizer(name)
    ids = data.draw(completions(name))
    places = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    spare = data.draw(st.lists(st.integers(len(tokenizer), 200_000), min_size=len(places), max_size=len(places)))
    mixed = [*ids]
    for place, i in zip(reversed(places), spare, strict=True):
        mixed.insert(place, i)
    offsets, expected = token_offsets(mixed, tokenizer), token_offsets(ids, tokenizer)
    known = [t for t, i in enumerate(mixed) if i < len(tokenizer)]
    assert offsets.text == expected.text
    assert offsets.starts[known].tolist() == expected.starts.tolist()
    assert offsets.ends[known].tolist() == expected.ends.tolist()
    assert decoded(mixed, tokenizer) == tokenizer.decode(ids)
    assert [decoded([i], tokenizer) for i in spare] == [""] * len(spare)
    by_place = {place: t for place, t in enumerate(known)}
    answer, own = find_answer(mixed, tokenizer), find_answer(ids, tokenizer)
    assert (answer is None) == (own is None)
    assert answer is None or answer == (by_place[own.start], by_place[own.end - 1] + 1)
    expected_spans = [(by_place[start], by_place[end - 1] + 1) for start, end in detect_spans(ids, tokenizer)]
    assert detect_spans(mixed, tokenizer) == expected_spans


def test_tokens_added_later_are_known() -> None:
    tokenizer = wrap(byte_level(None))
    ids = encode(tokenizer, "She has 3")
    assert token_offsets([*ids, len(tokenizer)], tokenizer).text == "She has 3"
    tokenizer.add_tokens(["<extra>"])
    assert token_offsets([*ids, len(tokenizer) - 1], tokenizer).text == "She has 3<extra>"
    tokenizer.add_special_tokens({"bos_token": "<extra>"})
    assert token_offsets([*ids, len(tokenizer) - 1], tokenizer).text == "She has 3"


def test_a_used_tokenizer_can_be_collected() -> None:
    tokenizer = wrap(byte_level(None))
    detect_spans(encode(tokenizer, CORPUS[0]), tokenizer)
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None
