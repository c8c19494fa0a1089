"""What a run sets before its first step, and refuses: models whose log-probs it would take wrongly."""

import pytest
import torch
import transformers

from tests.support.embedded import SMALL, settings
from tests.support.tiny import tiny_tokenizer
from trainer.__main__ import main
from trainer.run import set_up

SIZE = {
    "vocab_size": len(tiny_tokenizer()), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
MODELS = {
    "ModernBertDecoder": {"cls_token_id": 1, "sep_token_id": 1, "initializer_range": 0.2},
    "Llama": {"attention_dropout": 0.5},
    "Phi3": {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 128},
}


@pytest.fixture
def saved(tmp_path):
    """Saves a model of the named kind, with random weights, and returns its folder."""

    def save(kind: str):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZE | MODELS[kind])
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path / kind)
        tiny_tokenizer().save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


def test_a_model_whose_logits_are_not_its_heads_output_is_refused_also_without_credit(saved, capsys) -> None:
    folder = saved("ModernBertDecoder")
    run = folder.parent / "run"
    argv = [*SMALL, f"--model={folder}", "--credit=none", f"--output_dir={run}", "--max_completion_length=4"]
    assert main(argv) == 1
    printed = capsys.readouterr().err
    assert "error: model: " in printed
    assert "ModernBertDecoderForCausalLM" in printed
    assert "head" in printed
    assert not run.exists()


def test_dropout_is_refused_with_the_file_that_sets_it(saved) -> None:
    with pytest.raises(NotImplementedError, match=r"takes attention_dropout=0\); the program reads config.json in its"):
        set_up(settings(f"--model={saved('Llama')}", "--credit=none", "--max_completion_length=4"))


def test_compilation_that_is_asked_for_where_it_cannot_be_is_refused(tmp_path, capsys) -> None:
    assert main([*SMALL, "--torch_compile=on", f"--output_dir={tmp_path / 'run'}"]) == 1
    assert "error: model: the layers of" in (printed := capsys.readouterr().err)
    assert "cannot be compiled: on a CPU" in printed


def test_rows_that_may_change_each_others_rotary_frequencies_are_refused(saved) -> None:
    folder = saved("Phi3")
    with pytest.raises(NotImplementedError, match=r"rotary frequencies of Phi3ForCausalLM .* 128 tokens"):
        set_up(settings(f"--model={folder}", "--credit=none", "--max_completion_length=128"))
