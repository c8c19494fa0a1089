"""A language model of a few thousand parameters whose random completions hold arithmetic and answers."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# Whole phrases are tokens, so that sampling them at random writes solutions to be masked and scored.
PHRASES = ["3 + 4 = 7. ", "7 - 2 = 5. ", "So we add them up. ", "Then half is left. ", "#### 7", "#### 5"]
WORDS = ["<pad>", "<eos>", "<unk>", "What", "is", "3", "+", "4", "?", "Add", "and", "halve", "user", "assistant"]
TEMPLATE = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}{% endfor %}"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word or phrase; decoding joins phrases as they are."""
    vocab = {text: i for i, text in enumerate(WORDS + PHRASES)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(**options: object) -> Qwen3ForCausalLM:
    """Two layers of a Qwen3 that samples phrases often and prompt words hardly ever."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS) + len(PHRASES), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=False, **options,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


ROWS = [{"question": f"What is 3 + 4 ?{' Add' * (i % 3)} {i}", "answer": "#### 7"} for i in range(8)]
TINY_RUN = [
    "--eval_problems=2", "--device=cpu", "--generation_batch_size=4",
    "--num_generations=2", "--max_steps=1", "--max_completion_length=8", "--instruction=",
]  # fmt: skip
"""Settings of the training program for the model and the problems of `write_tiny`."""


def jsonl(*rows: object) -> str:
    """Lines of JSON; text as it is."""
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def write_tiny(folder: Path) -> Path:
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text(jsonl(*ROWS))
    return folder
