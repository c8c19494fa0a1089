"""What pads a batch and what ends a completion: by position, whatever the tokenizer calls them."""

import json
import shutil

import pytest
import torch

from tests.support.embedded import EVERY_OTHER
from tests.support.runs import config
from tests.support.tiny import TINY_RUN
from trainer.run import set_up
from trainer.step import training_step

END = 1


@pytest.fixture
def trained(tiny_folder, tmp_path):
    """Trains two steps with some settings of the tokenizer; gives the trainer and the steps."""

    def run(name: str, **changed):
        model = shutil.copytree(tiny_folder / "model", tmp_path / name)
        file = model / "tokenizer_config.json"
        said = json.loads(file.read_text()) | changed
        file.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
        flags = ["--no_use_peft", "--learning_rate=1e-2", "--no_mask_truncated_completions", "--credit=uniform"]
        files = [f"--model={model}", f"--dataset={tiny_folder / 'rows.jsonl'}"]
        trainer = set_up(config(*TINY_RUN, *files, *flags, EVERY_OTHER))
        return trainer, [training_step(trainer, step, [0, 1, 2, 4]) for step in (1, 2)]

    return run


def test_where_the_end_token_pads_completions_end_and_learn_as_with_a_pad_token_of_its_own(trained) -> None:
    own, expected = trained("own")
    shared, steps = trained("shared", pad_token=None)
    assert own.tokenizer.pad_token_id != shared.tokenizer.pad_token_id == END
    for one, other in zip(expected, steps, strict=True):
        assert one.batch.rollouts.rows.lengths == other.batch.rollouts.rows.lengths
        assert one.batch.rollouts.texts == other.batch.rollouts.texts
        assert [row[-1] != END for row in other.batch.rollouts.ids()] == other.batch.rollouts.truncated.tolist()
    lengths = [length for one in steps for length in one.batch.rollouts.rows.lengths]
    assert min(lengths) < max(lengths)  # some are padded
    assert any(
        (~one.batch.rollouts.truncated & (one.advantages != 0)).any() for one in steps
    )  # the end token is trained
    torch.testing.assert_close([*own.policy.parameters()], [*shared.policy.parameters()], rtol=0, atol=0)
