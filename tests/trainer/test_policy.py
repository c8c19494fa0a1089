"""Loading and saving: a policy is exactly what its checkpoint holds, and what is saved is finite."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.embedded import SMALL, settings
from tests.support.tiny import write_tiny
from trainer.__main__ import main
from trainer.policy import load_policy, load_tokenizer, save_policy

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def folder(tmp_path):
    """A saved model of a few thousand parameters, to be changed."""
    return write_tiny(tmp_path) / "model"


def loaded(folder, *argv):
    config = settings(f"--model={folder}", *argv)
    tokenizer, _ = load_tokenizer(config)
    return load_policy(config, tokenizer), tokenizer


def change(folder, **tensors) -> None:
    """Put tensors into the checkpoint in `folder` under these names, or take them out by None."""
    file = folder / "model.safetensors"
    changed = load_file(file) | tensors
    save_file({name: x for name, x in changed.items() if x is not None}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"lm_head.weight": None, NORM: None}, f"its checkpoint has 2 missing_keys: lm_head.weight, {NORM}"),
        ({"layers.0.bias": torch.zeros(48)}, "its checkpoint has 1 unexpected_keys: layers.0.bias"),
        ({NORM: torch.ones(16)}, "cannot be loaded: "),
        ({NORM: torch.tensor([torch.nan] + [1.0] * 31)}, f"parameter {NORM} is not finite"),
    ],
)
def test_a_checkpoint_that_does_not_hold_the_models_tensors_ends_the_program(folder, capsys, tensors, said) -> None:
    change(folder, **tensors)
    run = folder.parent / "run"
    assert main([*SMALL, f"--model={folder}", f"--output_dir={run}", "--max_completion_length=4"]) == 1
    assert said in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.parametrize("peft", ["--no_use_peft", "--use_peft"])
def test_a_model_with_a_weight_that_is_not_finite_is_not_saved(folder, peft) -> None:
    policy, tokenizer = loaded(folder, peft)
    name, parameter = next((n, p) for n, p in policy.named_parameters() if p.requires_grad and "layers.1" in n)
    parameter.data.flatten()[3] = torch.inf
    with pytest.raises(FloatingPointError, match=f"parameter {name} is not finite"):
        save_policy(policy, tokenizer, folder.parent / "saved")
    assert not (folder.parent / "saved").exists()
