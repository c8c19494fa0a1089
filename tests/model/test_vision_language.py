"""Vision-language classes on text only: scored and trained as they are, and what to do where one is not."""

from typing import Any

import pytest
import torch
import transformers

from cfa_kernels import Rows, check_model, packed_policy_loss
from cfa_kernels.loss.policy import policy_loss
from tests.support.models import MASKED, SHAPE, skip_unless_runs

TEXT = SHAPE | {"head_dim": 16}
SEES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
QWEN = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14}
QWEN_IDS = {"image_token_id": 200, "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 203}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text_config": TEXT | {"sliding_window": 9}, "vision_config": SEES | {"image_size": 28},
        "image_token_index": 200, "boi_token_index": 201, "eoi_token_index": 202, "mm_tokens_per_image": 4,
    },
    "Qwen3VL": {
        "text_config": TEXT | {"rope_parameters": ROPE}, "vision_config": QWEN | {"deepstack_visual_indexes": [0]},
        **QWEN_IDS,
    },
    "Llama4": {
        "text_config": TEXT | MASKED["Llama4Text"], "image_token_index": 200, "boi_token_index": 201,
        "eoi_token_index": 202, "vision_config": SEES | {
            "intermediate_size": 128, "image_size": 28, "vision_output_dim": 64, "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
    },
}  # fmt: skip


def make(name: str) -> Any:
    skip_unless_runs(name)
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    return kind(getattr(transformers, f"{name}Config")(**CONFIGS[name]))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "Llama4"])
def test_text_is_scored_and_trained_as_by_the_models_own_forward(name):
    model = make(name).train()
    check_model(model)
    ids = torch.randint(5, 190, (4, 24), generator=torch.Generator().manual_seed(0))
    rows, advantages = Rows(list(ids[:, :8]), list(ids[:, 8:])), torch.tensor([1.0, -1.0, 0.5, -0.5])
    loss, _, _ = packed_policy_loss(model, rows, advantages=advantages)
    loss.backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model(input_ids=ids).logits[:, 7:-1]
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 8:, None])[..., 0]
    own, _ = policy_loss(logprobs, None, advantages, torch.ones(4, 16))
    own.backward()
    torch.testing.assert_close(loss, own, rtol=1e-4, atol=1e-5)
    assert len(packed) > 10
    for n, p in model.named_parameters():
        if n in packed:
            assert (packed[n] - p.grad).norm() <= 1e-3 * p.grad.norm() + 1e-6, n


def test_llama_4_says_which_of_its_parts_to_take():
    model = make("Llama4")
    with pytest.raises(
        NotImplementedError, match=r"Llama4ForConditionalGeneration has no LM head .*; pass model\.language_model,"
    ):
        check_model(model)
    check_model(model.language_model)
