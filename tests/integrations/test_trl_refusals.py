"""What credit and the packed loss refuse in TRL, when, and that without them TRL runs as it does alone."""

import copy
import functools
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from cfa_kernels import CounterfactualConfig
from tests.support.models import skip_before
from tests.support.tiny import PHRASES, WORDS, tiny_model

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from accelerate.utils import DistributedType  # noqa: E402
from transformers import MambaConfig, MambaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from cfa_kernels.integrations import trl_refusals  # noqa: E402
from cfa_kernels.integrations.trl import CounterfactualMixin, PackedGRPOTrainer  # noqa: E402
from tests.support import trl_training  # noqa: E402
from tests.support.trl_training import changed, experts, logged, packs  # noqa: E402

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


class LouderLM(Qwen3ForCausalLM):
    """Multiplies its logits by what no configuration tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 1.5 * output.logits
        return output


class OtherRouters(Qwen3MoeForCausalLM):
    """Doubles the loss of its routers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.aux_loss = None if output.aux_loss is None else 2 * output.aux_loss
        return output


@packs
@pytest.mark.parametrize(
    ("model", "given", "fragment"),
    [
        (mamba, {}, "model: MambaForCausalLM .*credit=None"),
        (mamba, {"credit": CounterfactualConfig("entropy_shaping", control="random")}, "model: MambaForCausalLM"),
        (mamba, {"credit": CounterfactualConfig(control="random")}, None),
        (lambda: LouderLM(tiny_model().config), {"packed_loss": True}, "model: .* LouderLM .* nats.*packed_loss=False"),
        (lambda: tiny_model(attention_dropout=0.1), {"packed_loss": True}, "attention_dropout 0.1 .*packed_loss=False"),
        (lambda: OtherRouters(experts().config), {"packed_loss": True}, "differs by 50%.*router_aux_loss_coef=0.0"),
    ],
)
def test_a_model_that_cannot_be_scored_or_packed_is_named_with_the_way_to_train_it(build, model, given, fragment):
    if "router" in str(fragment):
        skip_before("5.15", "cannot set how experts run in a class of one's own")
    credit = {"credit": UNIFORM} if "packed_loss" in given else {}
    options = {"gradient_checkpointing": "hands states" in str(fragment)}
    if fragment is None:
        build(trainer={"model": model()} | given, **options)
        return
    with pytest.raises(NotImplementedError, match=fragment):
        build(trainer={"model": model()} | credit | given, **options)
    build(trainer={"model": model(), "credit": UNIFORM, "packed_loss": False}, **options)


@pytest.mark.parametrize(("base", "model"), [(GMPOTrainer, tiny_model), (GRPOTrainer, mamba)])
def test_with_credit_switched_off_nothing_is_refused_and_training_is_trls_own(train, base, model):
    stock, mine = (
        train(cls, trainer={"model": model()} | given)
        for cls, given in ((base, {}), (with_mixin(base), {"credit": UNIFORM}))
    )
    assert not changed(stock, mine)
    assert changed(stock, SimpleNamespace(model=model()))
    for name in ("loss", "grad_norm", "reward", "entropy"):
        assert logged(stock, name) == logged(mine, name)


def test_the_entropy_is_left_out_of_the_packed_loss_only(build):
    with pytest.raises(ValueError, match="log_entropy=False needs packed_loss=True"):
        build(trainer={"log_entropy": False})


@packs
@pytest.mark.parametrize(
    ("kind", "stage", "gathers", "refused"),
    [(DistributedType.FSDP, 0, True, True), (DistributedType.DEEPSPEED, 3, True, False),
     (DistributedType.DEEPSPEED, 3, False, True)],
)  # fmt: skip
def test_sharded_models_are_not_refused_but_for_gradients_through_them(
    made, monkeypatch, kind, stage, gathers, refused
):
    monkeypatch.setattr(made.accelerator, "distributed_type", kind)
    monkeypatch.setattr(trl_refusals, "zero_stage", lambda trainer: stage)
    monkeypatch.setattr(made.args, "ds3_gather_for_generation", gathers)
    assert trl_refusals.credit_obstacles(made) == trl_refusals.packing_obstacles(made) == []
    for options in ({"estimator": "gradient"}, {"estimator.preselect": 0.5, "estimator.preselect_by": "gradient"}):
        trainer = SimpleNamespace(**vars(made) | {"credit": CounterfactualConfig.of(options)})
        assert ["gradient" in reason for reason in trl_refusals.credit_obstacles(trainer)] == [True] * refused


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


@packs
def test_a_model_that_is_placed_by_training_is_tried_before_the_first_completion(build, monkeypatch):
    tried: list[str] = []
    for name in ("check_supported", "check_trains_packed"):
        check = getattr(integration, name)
        monkeypatch.setattr(
            integration, name, lambda model, name=name, check=check, **_: tried.append(name) or check(model)
        )

    class Later(PackedGRPOTrainer):
        def _model_is_placed(self) -> bool:
            return False

        @contextmanager
        def _queried_model(self):
            tried.append("queried")
            with super()._queried_model() as model:
                yield model

        def _generate(self, *args, **kwargs):
            assert tried[:3] == ["queried", "check_supported", "check_trains_packed"]
            return super()._generate(*args, **kwargs)

    trainer = build(Later, trainer={"packed_loss": True}, max_steps=2)
    assert tried == []
    trainer.train()
    assert tried.count("check_supported") == 1


@pytest.mark.parametrize(
    ("kind", "device", "placed"),
    [
        (DistributedType.NO, "cpu", True), (DistributedType.MULTI_GPU, "meta", False),
        (DistributedType.DEEPSPEED, "cpu", False), (DistributedType.FSDP, "cpu", False),
    ],
)  # fmt: skip
def test_a_model_is_placed_when_it_is_whole_on_the_device(kind, device, placed):
    trainer = object.__new__(PackedGRPOTrainer)
    trainer.accelerator = SimpleNamespace(distributed_type=kind, device=torch.device("cpu"))
    trainer.model = torch.nn.Linear(2, 2, device=device)
    assert trainer._model_is_placed() == placed
