"""CF's importances beside those of its authors' own package, aligntune, given rows for which both mean the same."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.harness.race import Absent
from benchmarks.harness.workloads import Job
from benchmarks.speed.peers import aligntune_batched
from cfa_kernels import Span
from tests.support.models import score_columns

pytestmark = pytest.mark.slow

WORDS = ["<pad>", "<eos>", *"abcdefgh", "3", "4", "7", "+", "=", "\n", "####", "##", " Final", " answer", ":"]
IDS = {word: i for i, word in enumerate(WORDS)}
PAD = IDS["<pad>"]
PROMPT, REASONING, ANSWER = list("abcd"), [*"3+4=7efgh4+3=7", "\n"], ["7", "4", "a"]
SPANS = [Span(0, 5), Span(3, 8), Span(9, 14), Span(14, 15)]  # overlapping, and up to the marker


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel(IDS, unk_token="<eos>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def row_of(tokenizer, marker, left, right):
    """One row with pads as given; its answer is what aligntune scores: all behind the marker's first token."""
    prompt = ["<pad>"] * left + PROMPT
    completion = REASONING + marker + ANSWER + ["<pad>"] * right
    prompt, completion = (torch.tensor([IDS[word] for word in words]) for words in (prompt, completion))
    answer = Span(len(REASONING) + 1, len(completion))
    return Job("one row", "made up", [prompt], [completion], [SPANS], [answer], PAD, tokenizer)


def stretched(importances, length):
    """aligntune's number per token from importances per span: a floor, each span's share, stretched to [0.5, 1]."""
    raw = torch.full((len(REASONING),), 0.2, dtype=torch.float64)
    for importance, (start, end) in zip(importances.tolist(), SPANS, strict=True):
        for t in range(start, end):
            raw[t] += importance / (end - start)
    assert raw.max() - raw.min() > 0.1  # nats, far above rounding
    scale = (raw - raw.min()) / (raw.max() - raw.min())
    return torch.cat([0.5 + 0.5 * scale, torch.zeros(length - len(REASONING), dtype=torch.float64)])


@pytest.mark.parametrize("marker", [["####"], ["##", "##"], [" Final", " answer", ":"]], ids="".join)
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (0, 3)], ids=["no pads", "pads before", "pads behind"])
def test_importances_of_spans_are_those_of_the_authors_package_for_its_answer(marker, left, right, model, tokenizer):
    """With pads its answer and its prompt hold them, so ours are given them as tokens like any other."""
    job = row_of(tokenizer, marker, left, right)
    try:
        (theirs,) = aligntune_batched(model, job)
    except Absent as error:
        pytest.skip(str(error))
    scores = score_columns(model, job.prompts, job.completions, job.spans, job.answers, mask=job.placeholder_id)
    torch.testing.assert_close(theirs, stretched(scores.drop[0], len(job.completions[0])), rtol=0, atol=1e-5)
