"""What credit and the packed loss refuse in TRL, when, and that without them TRL runs as it does alone."""

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from cfa_kernels import CounterfactualConfig
from tests.support.tiny import PHRASES, WORDS, tiny_model

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from accelerate.utils import DistributedType  # noqa: E402
from transformers import MambaConfig, MambaForCausalLM  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from cfa_kernels.integrations import trl_refusals  # noqa: E402
from cfa_kernels.integrations.trl import CounterfactualMixin, PackedGRPOTrainer  # noqa: E402
from tests.support import trl_training  # noqa: E402
from tests.support.trl_training import changed, logged, packs  # noqa: E402

try:
    from trl.experimental.gmpo import GMPOTrainer
except ImportError:

    class GMPOTrainer(GRPOTrainer):
        """By name alone the one of a later TRL."""

        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)


# All is on the host: nothing to tell apart.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.traced]
UNIFORM = CounterfactualConfig(control="off")
PACKED = {"credit": UNIFORM, "packed_loss": True}


@pytest.fixture
def build(tmp_path) -> Callable[..., Any]:
    return lambda *args, **options: trl_training.build(str(tmp_path / "run"), *args, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Any:
    """A trainer whose settings the cases change; accelerate's state does not outlive a test."""
    trainer = trl_training.build(str(tmp_path_factory.mktemp("run")))
    trainer.accelerator = SimpleNamespace(
        distributed_type=DistributedType.NO, num_processes=1, parallelism_config=None,
        state=SimpleNamespace(deepspeed_plugin=None), unwrap_model=lambda model: model,
    )  # fmt: skip
    return trainer


def own(name: str, base: type = GRPOTrainer) -> type:
    """A trainer with its own method `name`, which calls the base's."""
    return type("Own", (base,), {name: lambda self, *args, **kwargs: getattr(base, name)(self, *args, **kwargs)})


class Ligers(GRPOTrainer):
    """As TRL was before 1.14 with Liger's loss."""

    compute_liger_loss = None


def with_mixin(base: type) -> type:
    return base if issubclass(base, CounterfactualMixin) else type("Mine", (CounterfactualMixin, base), {})


OLD, NEW = ({"TRL": Version(version)} for version in ("1.9.0", "1.17.0"))
SEQUENCE = {"importance_sampling_level": "sequence"}
VLLM = {"args.use_vllm": True}
ONE_RATIO = "importance_sampling_level='sequence': a completion has one ratio there"
KIND = "DistributedType.NO: layers, sequences and the head must be whole"
LIGER = "use_liger_kernel=True in TRL"
IMAGES = {"train_dataset": SimpleNamespace(column_names=["prompt", "images"])}
SPLIT = {
    "credit": CounterfactualConfig("prefix_tree"), "accelerator.num_processes": 2,
    "args.per_device_train_batch_size": 4, "args.steps_per_generation": 1,
}  # fmt: skip
# (TRL's class, settings of the trainer, what is pretended of the module; fragments of the refusals of credit and loss)
CASES: list[tuple[type, dict[str, Any], dict[str, Any], str, str]] = [
    (GRPOTrainer, {}, {}, "", ""),
    (GRPOTrainer, {"loss_type": "luspo"}, OLD, "loss_type='luspo' in TRL 1.9.0", "TRL 1.9.0: it normalises"),
    (GMPOTrainer, {}, {}, "GMPOTrainer: its loss takes one advantage", "it has its own loss (_compute_loss)"),
    (GRPOTrainer, {"credit": CounterfactualConfig("external")}, {}, "estimator='external': it needs", ""),
    (GRPOTrainer, SPLIT, {}, "groups of 8 are split between them", ""),
    (GRPOTrainer, {"loss_type": "grpo"} | SEQUENCE, {}, ONE_RATIO, ""),
    (GRPOTrainer, {"loss_type": "vespo"} | SEQUENCE, {}, "", "importance_sampling_level='sequence' with loss_type='ve"),
    (GRPOTrainer, {"loss_type": "new"}, {}, "", "loss_type='new': it is not one of grpo, bnpo"),
    (GRPOTrainer, {"args.neftune_noise_alpha": 5.0}, {}, "", "neftune_noise_alpha=5.0: completions would share"),
    (GRPOTrainer, {"args.vllm_importance_sampling_mode": "token_mask", "loss_type": "grpo"} | SEQUENCE | VLLM, {},
     ONE_RATIO, "vllm_importance_sampling_mode='token_mask' with"),
    (GRPOTrainer, {"args.top_p": 0.9} | VLLM, NEW, "", "top_p=0.9 in TRL 1.17.0: its correction for cut"),
    (GRPOTrainer, {"args.top_p": 0.9} | VLLM, {}, "", ""),
    (Ligers, {"use_liger_kernel": True}, {}, LIGER, LIGER),
    (GRPOTrainer, {}, {"_RUNS": {DistributedType.MULTI_GPU}}, KIND, KIND),
    (GRPOTrainer, IMAGES, {}, "images in the dataset", "images in the dataset"),
    *((GRPOTrainer, {"accelerator.parallelism_config": SimpleNamespace(**{f"{name}_enabled": True})}, {},
       f"{name} parallelism: layers", f"{name} parallelism: layers") for name in ("tp", "cp", "sp")),
    *((own(name), {}, {}, "", f"Mine: it has its own {what} ({name})") for what, name in (
        ("loss", "_compute_loss"), ("log-probs", "_get_per_token_logps_and_entropies"),
        ("off-policy mask", "get_off_policy_mask"), ("factors of vespo", "get_gamma_weights"))),
    (own("_get_per_token_logps_and_entropies", PackedGRPOTrainer), {}, {}, "", "Own: it has its own log-probs"),
    (own("_compute_loss", PackedGRPOTrainer), {}, {}, "", ""),
]  # fmt: skip


@packs
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join([case[0].__name__, *case[1], *case[2]]))
def test_what_cannot_be_combined_is_named(made, monkeypatch, case):
    base, settings, pretended, *fragments = case
    probe = object.__new__(with_mixin(base))
    vars(probe).update(vars(made) | {"credit": CounterfactualConfig()})
    for name, value in pretended.items():
        monkeypatch.setattr(trl_refusals, name, value)
    probe.args, probe.accelerator = copy.copy(made.args), copy.copy(made.accelerator)
    for name, value in settings.items():
        owner, _, last = name.rpartition(".")
        vars(getattr(probe, owner) if owner else probe)[last] = value
    found = [trl_refusals.credit_obstacles(probe), trl_refusals.packing_obstacles(probe)]
    for reasons, fragment in zip(found, fragments, strict=True):
        assert bool(reasons) == bool(fragment), reasons
        assert fragment in "; ".join(reasons)


@packs
def test_a_loss_patched_into_trls_is_refused_and_every_obstacle_is_named_at_once(build, monkeypatch):
    plain = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", functools.wraps(plain)(lambda *args: plain(*args) * 0.0))
    named = r"packed_loss=True cannot be combined with PackedGRPOTrainer: it has its own loss .*; nor with neftune_noi"
    with pytest.raises(NotImplementedError, match=named):
        build(trainer={"packed_loss": True}, neftune_noise_alpha=5.0)
    build(trainer={"packed_loss": False})
    with pytest.raises(ValueError, match="log_entropy=False needs packed_loss=True"):
        build(trainer={"packed_loss": False, "log_entropy": False})


def test_a_class_whose_trainer_comes_first_would_train_without_credit_and_is_refused():
    assert with_mixin(type("Theirs", (GRPOTrainer,), {}))
    with pytest.raises(TypeError, match=r"class Behind\(CounterfactualMixin, TheTrainer\)"):
        type("Behind", (GRPOTrainer, CounterfactualMixin), {})


def mamba() -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=len(WORDS) + len(PHRASES), hidden_size=16, num_hidden_layers=1, state_size=4, expand=1,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return MambaForCausalLM(config)


@packs
@pytest.mark.parametrize(
    ("model", "given", "fragment"),
    [
        (mamba, {}, "model: MambaForCausalLM .*credit=None, packed_loss=False"),
        (mamba, {"credit": CounterfactualConfig(control="random")}, None),
        (lambda: tiny_model(attention_dropout=0.1), PACKED, "attention_dropout 0.1 .*packed_loss=False"),
    ],
)
def test_a_model_that_cannot_be_scored_or_packed_is_named_before_the_first_completion(build, model, given, fragment):
    class Watched(PackedGRPOTrainer):
        def _generate(self, *args, **kwargs):
            raise InterruptedError

    expected = (
        pytest.raises(InterruptedError) if fragment is None else pytest.raises(NotImplementedError, match=fragment)
    )
    with expected:
        build(Watched, trainer={"model": model()} | given).train()


def test_with_credit_switched_off_nothing_is_refused_and_training_is_trls_own(train):
    stock, mine = (
        train(cls, trainer={"model": mamba()} | given)
        for cls, given in ((GMPOTrainer, {}), (with_mixin(GMPOTrainer), {"credit": UNIFORM}))
    )
    assert not changed(stock, mine)
    assert changed(stock, SimpleNamespace(model=mamba()))
    for name in ("loss", "grad_norm", "reward", "entropy"):
        assert logged(stock, name) == logged(mine, name)


@packs
@pytest.mark.parametrize(("kind", "stage"), [(DistributedType.FSDP, 0), (DistributedType.DEEPSPEED, 3)])
def test_sharded_models_are_refused_only_gradients_through_them(made, monkeypatch, kind, stage):
    monkeypatch.setattr(made.accelerator, "distributed_type", kind)
    monkeypatch.setattr(made.accelerator.state, "deepspeed_plugin", SimpleNamespace(zero_stage=stage))
    assert trl_refusals.credit_obstacles(made) == trl_refusals.packing_obstacles(made) == []
    trainer = SimpleNamespace(**vars(made) | {"credit": CounterfactualConfig("gradient")})
    (reason,) = trl_refusals.credit_obstacles(trainer)
    assert "gradient" in reason


@pytest.mark.parametrize("control", [None, "off"])
def test_images_that_come_with_the_rollouts_are_refused_where_there_is_credit_or_a_loss(control):
    class WithImages(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return inputs

    trainer = object.__new__(with_mixin(WithImages))
    trainer.credit, trainer.packed_loss = CounterfactualConfig(control=control), control == "off"
    trainer.model, trainer._model_is_checked = SimpleNamespace(training=True), True
    expected = "counterfactual credit" if control is None else "packed_loss=True"
    with pytest.raises(NotImplementedError, match=rf"{expected} cannot be combined with images \(pixel_values\)"):
        trainer._generate_and_score_completions({"pixel_values": torch.zeros(1)})
