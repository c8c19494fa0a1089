"""What a run sets before its first step, and refuses: models whose log-probs it would take wrongly."""

import transformers

from tests.support.embedded import SMALL
from tests.support.tiny import tiny_tokenizer
from trainer.__main__ import main


def test_a_model_whose_logits_are_not_its_heads_output_is_refused_also_without_credit(tmp_path, capsys) -> None:
    size = {"vocab_size": len(tiny_tokenizer()), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    ends = dict.fromkeys(("eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 1) | {"pad_token_id": 0}
    config = transformers.ModernBertDecoderConfig(num_attention_heads=4, initializer_range=0.2, **size, **ends)
    folder = tmp_path / "model"
    transformers.ModernBertDecoderForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    run = folder.parent / "run"
    argv = [*SMALL, f"--model={folder}", "--credit=none", f"--output_dir={run}", "--max_completion_length=4"]
    assert main(argv) == 1
    printed = capsys.readouterr().err
    assert "error: model: " in printed
    assert "ModernBertDecoderForCausalLM" in printed
    assert "head" in printed
    assert not run.exists()


def test_compilation_that_is_asked_for_where_it_cannot_be_is_refused(tmp_path, capsys) -> None:
    assert main([*SMALL, "--torch_compile=on", f"--output_dir={tmp_path / 'run'}"]) == 1
    assert "error: model: the layers of" in (printed := capsys.readouterr().err)
    assert "cannot be compiled: on a CPU" in printed
