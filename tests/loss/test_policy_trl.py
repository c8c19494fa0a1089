"""policy_loss against TRL's own `GRPOTrainer._compute_loss`, run in float64 without a model."""

from types import SimpleNamespace

import pytest
import torch

from cfa_kernels.loss.policy import policy_loss
from tests.support.policy_problem import OF_TRL

pytest.importorskip("trl", "1.10", reason="TRL 1.10 or newer, which normalises losses so, is not installed")

from trl.trainer import grpo_trainer

B, T = 5, 9


class _OneProcess:
    num_processes = 1

    def reduce(self, tensor, reduction):
        return tensor

    def gather(self, tensor):
        return tensor


def trl_trainer(logprobs, entropies, **options):
    """A GRPOTrainer with no model: `_compute_loss` gets these log-probs and keeps its metrics in `_metrics`."""
    kind = grpo_trainer.GRPOTrainer
    if options["loss_type"] == "gmpo":
        kind = pytest.importorskip("trl.experimental.gmpo", reason="TRL has no GMPO").GMPOTrainer
    trainer = object.__new__(kind)
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = _OneProcess()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logprobs, entropies, None)
    trainer._metrics = {"train": grpo_trainer.defaultdict(list)}
    trainer.aux_loss_enabled = trainer.use_adaptive_entropy = False
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = options["sampling_mode"] is not None
    trainer.top_entropy_quantile = 1.0
    trainer.off_policy_mask_threshold = None
    trainer.current_gradient_accumulation_steps = 1
    vars(trainer).update(options, epsilon_low=options["epsilon"], _entropy_bonus_enabled=options["entropy_coef"] != 0)
    trainer.accelerator.sync_gradients = False
    rest = {"vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    trainer.args = SimpleNamespace(steps_per_generation=1, **rest, **options)
    return trainer


@pytest.fixture
def tokens():
    """Off-policy float64 tokens whose ratios fall on both sides of every clip, with ragged masks."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lengths = torch.tensor([9, 4, 1, 7, 6])
    mask = (torch.arange(T) < lengths[:, None]).long()
    mask[0, 3] = 0  # a tool's token inside the completion
    logprobs = -normal(B, T).abs() - 0.1
    return {
        "logprobs": logprobs, "old": logprobs + 0.5 * normal(B, T), "ref": logprobs + 0.3 * normal(B, T),
        "advantages": torch.tensor([1.3, -0.7, 0.4, -2.0, 0.0], dtype=torch.float64), "token_advantages": normal(B, T),
        "weights": 4 * torch.rand(B, T, generator=g, dtype=torch.float64) * (torch.rand(B, T, generator=g) > 0.2),
        "entropies": normal(B, T).abs(), "mask": mask, "sampled": logprobs + 0.4 * normal(B, T),
    }  # fmt: skip


def compare(tokens, *, advantages="advantages", old=True, weights=False, num_items=None, **options):
    options = {
        "epsilon": 0.2, "epsilon_high": 1.3 if options["loss_type"] == "cispo" else 0.28, "delta": None, "beta": 0.0,
        "max_completion_length": 12, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "entropy_coef": 0.0, "sampling_mode": None, **options,
    }  # fmt: skip
    n = int(tokens["mask"].sum()) if num_items is None else num_items
    a = tokens[advantages]
    folded = (a if a.dim() == 2 else a[:, None]) * tokens["weights"] if weights else a

    theirs = tokens["logprobs"].clone().requires_grad_()
    their_entropies = tokens["entropies"].clone().requires_grad_()
    trainer = trl_trainer(theirs, their_entropies, **options)
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": tokens["mask"],
        "advantages": folded, "num_items_in_batch": torch.tensor(n), "ref_per_token_logps": tokens["ref"],
    }  # fmt: skip
    if old:
        inputs["old_per_token_logps"] = tokens["old"]
    if mode := options["sampling_mode"]:  # TRL corrects where it generates
        options |= {"sampling_logprobs": tokens["sampled"], "sampling_clip_max": 1.3}
        ratio = ((tokens["old"] - tokens["sampled"]) * tokens["mask"]).exp()
        ratio = ratio.clamp(max=1.3) if mode == "token_truncate" else ratio.masked_fill(ratio > 1.3, 0)
        inputs["importance_sampling_ratio"] = ratio
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()

    ours = tokens["logprobs"].clone().requires_grad_()
    our_entropies = tokens["entropies"].clone().requires_grad_()
    loss, metrics = policy_loss(
        ours, tokens["old"] if old else None, a, tokens["mask"], weights=tokens["weights"] if weights else None,
        ref_logprobs=tokens["ref"] if options["beta"] else None, num_items_in_batch=num_items, entropies=our_entropies,
        validate=False, **options,  # weights differ at the sequence level too
    )  # fmt: skip
    loss.backward()
    exact = {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(loss, expected, **exact)
    torch.testing.assert_close(ours.grad, theirs.grad, **exact)
    if options["entropy_coef"]:
        torch.testing.assert_close(our_entropies.grad, their_entropies.grad, **exact)
    assert loss.dtype == torch.float64
    return metrics, {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize(("loss_type", "importance_sampling_level"), OF_TRL)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"old": False}, {"delta": 1.4}, {"beta": 0.05}, {"beta": 0.05, "use_bias_correction_kl": True},
        {"advantages": "token_advantages"}, {"num_items": 101}, {"entropy_coef": 0.01},
        {"epsilon": 0.05, "epsilon_high": 0.1, "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
        {"vespo_k_pos": 0.5, "sampling_mode": "token_truncate"}, {"beta": 0.05, "sampling_mode": "token_mask"},
        {"beta": 0.1, "delta": 1.5, "use_bias_correction_kl": True, "weights": True, "old": False},
        {"weights": True, "delta": 1.6}, {"weights": True, "delta": 1.6, "beta": 0.1, "advantages": "token_advantages"},
    ],
    ids=str,
)  # fmt: skip
def test_loss_gradient_and_metrics_equal_trl(tokens, loss_type, importance_sampling_level, options):
    reads_less = {"weights", "advantages", "use_bias_correction_kl", "entropy_coef", "sampling_mode"}  # than GRPO's
    if (loss_type == "gmpo" and options.keys() & reads_less) or (
        importance_sampling_level == "sequence" and "sampling_mode" in options
    ):
        pytest.skip("there is no such loss")
    if loss_type == "vespo":
        tokens["advantages"][-1] = 0.6  # TRL's mean weight counts rows without an advantage
    metrics, theirs = compare(
        tokens, loss_type=loss_type, importance_sampling_level=importance_sampling_level, **options
    )
    shared = sorted(set(metrics) & set(theirs))
    # Given advantages of tokens TRL averages over tokens, we over sequences; a masked token may be clipped in TRL.
    by_token = options.keys() & {"advantages", "weights"}
    left_out = {"vespo/phi_seq_mean"} if by_token else set()
    if (importance_sampling_level == "sequence" and by_token) or options.get("sampling_mode") == "token_mask":
        left_out |= {name for name in shared if "clip" in name}
    for name in sorted({*shared} - left_out):
        torch.testing.assert_close(float(metrics[name]), float(theirs[name]), rtol=1e-6, atol=1e-9, msg=name)
    clips = {"sapo": 0, "vespo": 0, "cispo": 1}.get(loss_type, 5)
    assert len([name for name in shared if "clip" in name]) == clips
    assert ("kl" in shared) == bool(options.get("beta"))
