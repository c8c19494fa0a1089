"""A policy with more output rows than its tokenizer has tokens draws one of them: the run goes on and shows nothing."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.embedded import metrics_of, run, samples_of
from trainer.settings import ASSETS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> Path:
    """The embedded model with 64 spare rows, one of which is drawn as often as a common token."""
    folder = tmp_path_factory.mktemp("padded")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(ASSETS), AutoTokenizer.from_pretrained(ASSETS)
    model.resize_token_embeddings(len(tokenizer) + 64, mean_resizing=False)
    (common,) = tokenizer(" is", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[len(tokenizer) + 7] = weight[common]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_run_that_draws_spare_ids_trains_evaluates_and_shows_them_as_nothing(padded, tmp_path, capsys) -> None:
    flags = ["--model", str(padded), "--no_use_peft", "--instruction=", "--temperature=1.0", "--top_p=1.0"]
    folder = run(tmp_path / "run", *flags, "--max_completion_length=80", "--log_completions=16")
    assert "64 of the model's" in capsys.readouterr().out
    assert len(metrics_of(folder)) == 4
    samples = samples_of(folder)
    with_spare = [sample for sample in samples if "" in sample["tokens"]]
    assert with_spare, "none was drawn"
    for sample in with_spare:
        assert len(sample["tokens"]) == len(sample["weights"])
        assert "".join(sample["tokens"]).startswith(sample["completion"])
    assert any(sample["answer"] for sample in with_spare)
