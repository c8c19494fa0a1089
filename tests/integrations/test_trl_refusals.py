"""What credit and the packed loss refuse in TRL, when, and that without them TRL runs as it does alone."""

import re
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from cfa_kernels import CounterfactualConfig
from tests.support.models import make_model, skip_before
from tests.support.tiny import PHRASES, WORDS, tiny_model

integration = pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from accelerate.utils import DistributedType  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig, PromptTuningConfig, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402
    MambaConfig,
    MambaForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from cfa_kernels.integrations import trl_refusals  # noqa: E402
from cfa_kernels.integrations.trl import CounterfactualGRPOTrainer, CounterfactualMixin  # noqa: E402
from tests.support import trl_training  # noqa: E402
from tests.support.trl_training import PROMPT, changed, experts, logged, packs  # noqa: E402

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


class Ligers(GRPOTrainer):
    """As TRL was before 1.14 with Liger's loss."""

    use_liger_kernel = property(lambda self: True, lambda self, value: None)

    def compute_liger_loss(self, model, inputs):
        return self._compute_loss(self.model, inputs)


class OwnLoss(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)


def before_1_10(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trl_refusals, "TRL", Version("1.9.0"))


def another_kind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trl_refusals, "_RUNS", {DistributedType.MULTI_GPU})


ASKED = [[{"role": "user", "content": PROMPT}]] * 8
IMAGES = {"train_dataset": Dataset.from_dict({"prompt": ASKED, "images": [[]] * 8})}
# name: TRL's configuration, arguments of the trainer, TRL's class, what is pretended, what the refusal says
CREDIT: dict[str, tuple[dict[str, Any], dict[str, Any], type, Any, str]] = {
    "luspo": ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {}, GRPOTrainer, before_1_10,
              "combined with loss_type='luspo' in TRL 1.9.0"),
    "GMPO": ({}, {}, GMPOTrainer, None, "combined with GMPOTrainer: its loss takes one advantage per sequence"),
    "Liger's loss": ({}, {}, Ligers, None, "combined with use_liger_kernel=True in TRL"),
    "another kind": ({}, {}, GRPOTrainer, another_kind, "DistributedType.NO: layers, sequences and the head"),
    "images": ({}, IMAGES, GRPOTrainer, None, "combined with images in the dataset"),
    "a state space": ({}, {"model": mamba}, GRPOTrainer, None, r"model: MambaForCausalLM .*credit=None"),
    "one ratio each": ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, {}, GRPOTrainer, None,
                       "combined with importance_sampling_level='sequence': .*; use .*='token'"),
}  # fmt: skip
LOSS: dict[str, tuple[dict[str, Any], dict[str, Any], type, Any, str]] = {
    "TRL before 1.10": ({}, {}, GRPOTrainer, before_1_10, "combined with TRL 1.9.0: it normalises"),
    "vespo": ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, {}, GRPOTrainer, None,
              "combined with importance_sampling_level='sequence' with loss_type='vespo'"),
    "GMPO": ({}, {}, GMPOTrainer, None, r"GMPOTrainer: it has its own loss \(_compute_loss\)"),
    "a loss of one's own": ({}, {}, OwnLoss, None, r"OwnLoss: it has its own loss \(_compute_loss\)"),
    "Liger's loss": ({}, {}, Ligers, None, "combined with use_liger_kernel=True in TRL"),
    "another kind": ({}, {}, GRPOTrainer, another_kind, "DistributedType.NO: layers, sequences and the head"),
    "images": ({}, IMAGES, GRPOTrainer, None, "combined with images in the dataset"),
    "logits changed": ({}, {"model": lambda: LouderLM(tiny_model().config)}, GRPOTrainer, None,
                       r"model: .* LouderLM .* nats.*packed_loss=False"),
    "noise in the embeddings": ({"neftune_noise_alpha": 5.0}, {}, GRPOTrainer, None, "neftune_noise_alpha=5.0: compl"),
}  # fmt: skip


class Routed(Qwen3ForCausalLM):
    """Asks for a loss of its routers by its configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        config.output_router_logits = True


class OtherRouters(Qwen3MoeForCausalLM):
    """Doubles the loss of its routers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.aux_loss = None if output.aux_loss is None else 2 * output.aux_loss
        return output


def llama4() -> Any:
    return make_model("Llama4Text", head_dim=16, num_local_experts=2, intermediate_size_mlp=64)


def adapter_with_dropout() -> Any:
    return get_peft_model(tiny_model(), LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"]))


LOSS |= {
    "an adapter's dropout": ({}, {"model": adapter_with_dropout}, GRPOTrainer, None,
                             r"has dropout 0.1 in .*, so it cannot .*; set lora_dropout=0.*; packed_loss=False"),
    "attention dropout": ({}, {"model": lambda: tiny_model(attention_dropout=0.1)}, GRPOTrainer, None,
                          r"attention_dropout 0.1 .*attention_dropout=0.*packed_loss=False"),
    "a loss of routers": ({}, {"model": lambda: Routed(tiny_model().config)}, GRPOTrainer, None,
                          r"(adds a loss of its routers \(output_router_logits\)|loss of its routers is not transf)"
                          ".*packed_loss=False"),
    "another loss of routers": ({}, {"model": lambda: OtherRouters(experts().config)}, GRPOTrainer, None,
                                "OtherRouters: the loss of its routers .* differs by 50%.*router_aux_loss_coef=0.0"),
    "routers without a loss": ({"router_aux_loss_coef": 0.1}, {"model": llama4}, GRPOTrainer, None,
                               r"Llama4ForCausalLM: the loss of its routers .*its own forward gives none"),
    "a state space": ({"gradient_checkpointing": False}, {"model": mamba}, GRPOTrainer, None,
                      "model: MambaForCausalLM .*packed_loss=False"),
}  # fmt: skip


def prepare(cases: dict[str, Any], name: str, patch: pytest.MonkeyPatch) -> tuple[dict, dict, type, str]:
    """TRL's configuration, the trainer's arguments, TRL's class and the message; pretends what the case pretends."""
    if name == "vespo" and not hasattr(GRPOConfig, "vespo_k_pos"):
        pytest.skip("this TRL has no vespo")
    if name == "another loss of routers":
        skip_before("5.15", "cannot set how experts run in a class of one's own")
    options, trainer, base, pretend, message = cases[name]
    if pretend is not None:
        pretend(patch)
    if "model" in trainer:
        trainer = trainer | {"model": trainer["model"]()}
    return options, trainer, base, message


def with_mixin(base: type) -> type:
    return type(f"Counterfactual{base.__name__}", (CounterfactualMixin, base), {})


def test_a_class_whose_trainer_comes_first_would_train_without_credit_and_is_refused():
    assert with_mixin(type("Theirs", (GRPOTrainer,), {}))
    with pytest.raises(TypeError, match=r"class Behind\(CounterfactualMixin, TheTrainer\)"):
        type("Behind", (GRPOTrainer, CounterfactualMixin), {})


@pytest.mark.parametrize("case", CREDIT)
def test_what_credit_cannot_be_combined_with_is_refused_by_name_at_construction(build, monkeypatch, case):
    options, trainer, base, message = prepare(CREDIT, case, monkeypatch)
    with pytest.raises(NotImplementedError, match=message):
        build(with_mixin(base), trainer=trainer, **options)


def test_under_the_random_control_a_model_is_checked_where_it_is_still_fed(build):
    for estimator in ("entropy_shaping", lambda model, batch: None):
        config = CounterfactualConfig(estimator, control="random")
        with pytest.raises(NotImplementedError, match="model: MambaForCausalLM"):
            build(trainer={"model": mamba(), "credit": config})
    build(trainer={"model": mamba(), "credit": CounterfactualConfig(control="random")})


@pytest.mark.parametrize("case", CREDIT)
def test_with_credit_switched_off_nothing_is_refused_and_training_is_trls_own(train, monkeypatch, case):
    options, trainer, base, _ = prepare(CREDIT, case, monkeypatch)
    trained = [
        train(cls, trainer=trainer | extra | ({"model": mamba()} if "model" in trainer else {}), **options)
        for cls, extra in ((base, {}), (with_mixin(base), {"credit": UNIFORM}))
    ]
    assert not changed(*trained)
    assert changed(trained[0], SimpleNamespace(model=mamba() if "model" in trainer else tiny_model()))
    for name in ("loss", "grad_norm", "reward", "entropy"):
        assert logged(trained[0], name) == logged(trained[1], name)


@packs
@pytest.mark.parametrize("case", LOSS)
def test_what_the_packed_loss_cannot_be_combined_with_is_refused_without_credit_too(build, monkeypatch, case):
    options, trainer, base, message = prepare(LOSS, case, monkeypatch)
    uniform = trainer | {"credit": UNIFORM}
    with pytest.raises(NotImplementedError, match=message) as refusal:
        build(with_mixin(base), trainer=uniform | {"packed_loss": True}, **options)
    assert "packed_loss=" in str(refusal.value)
    build(with_mixin(base), trainer=uniform, **options)


@packs
@pytest.mark.parametrize("given", [{}, {"packed_loss": True}], ids=str)
def test_prompt_tuning_is_refused_with_credit_and_with_the_packed_loss(build, given):
    model = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    credit = UNIFORM if given else CounterfactualConfig()
    with pytest.raises(NotImplementedError, match="PROMPT_TUNING adds virtual prompt tokens; use plain LoRA"):
        build(trainer=given | {"model": model, "credit": credit})
    build(trainer={"model": model, "credit": UNIFORM, "packed_loss": False})


def test_the_entropy_is_left_out_of_the_packed_loss_only(build):
    with pytest.raises(ValueError, match="log_entropy=False needs packed_loss=True"):
        build(trainer={"log_entropy": False})


@packs
def test_under_deepspeeds_stage_3_gradients_need_the_model_gathered(build, monkeypatch):
    for module in (integration, trl_refusals):
        monkeypatch.setattr(module, "zero_stage", lambda trainer: 3)
    build(trainer={"packed_loss": True}, ds3_gather_for_generation=False)
    gradient = {"credit": CounterfactualConfig(estimator="gradient")}
    with pytest.raises(NotImplementedError, match="gradients through the model itself, whole in this process"):
        build(trainer=gradient, ds3_gather_for_generation=False)
    build(trainer=gradient)


@pytest.mark.parametrize("name", ["tp", "cp", "sp"])
def test_a_model_or_sequences_that_processes_share_out_are_refused(build, name):
    built = build()
    trainer = SimpleNamespace(**vars(built) | {"accelerator": SimpleNamespace(
        distributed_type=DistributedType.NO, num_processes=1,
        parallelism_config=SimpleNamespace(**{f"{name}_enabled": True}),
        state=built.accelerator.state,
    )})  # fmt: skip
    assert trl_refusals.credit_obstacles(trainer) == [
        f"{name} parallelism: layers, sequences and the head must be whole; use DDP, FSDP or DeepSpeed"
    ]


@packs
@pytest.mark.parametrize(("kind", "stage"), [(DistributedType.FSDP, 0), (DistributedType.DEEPSPEED, 3)])
def test_sharded_models_are_not_refused_but_for_gradients_through_them(mine, monkeypatch, kind, stage):
    monkeypatch.setattr(mine.accelerator.state, "distributed_type", kind)
    monkeypatch.setattr(trl_refusals, "zero_stage", lambda trainer: stage)
    assert trl_refusals.credit_obstacles(mine) == []
    assert trl_refusals.packing_obstacles(mine) == []
    for options, message in (
        ({"estimator": "gradient"}, "estimator='gradient': .*which this trainer.*; take one of mask"),
        ({"preselect": 0.5, "preselect_by": "gradient"}, "preselect_by='gradient': .*; omit it"),
    ):
        trainer = SimpleNamespace(**vars(mine) | {"credit": CounterfactualConfig(**options)})
        reasons = trl_refusals.credit_obstacles(trainer)
        assert [bool(re.match(message, reason)) for reason in reasons] == [True] * (stage == 0)  # stage 3 gathers


@pytest.mark.parametrize("control", [None, "off"])
def test_images_that_come_with_the_rollouts_are_refused_where_there_is_credit_or_a_loss(control):
    class WithImages(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return inputs

    trainer = object.__new__(with_mixin(WithImages))
    trainer.credit, trainer.packed_loss = CounterfactualConfig(control=control), False
    trainer.model, trainer._model_is_checked = SimpleNamespace(training=True), True
    batch = {"pixel_values": torch.zeros(1)}
    if control == "off":
        assert trainer._generate_and_score_completions(batch) is batch
        trainer.packed_loss = True
    expected = "counterfactual credit" if control is None else "packed_loss=True"
    with pytest.raises(NotImplementedError, match=rf"{expected} cannot be combined with images \(pixel_values\)"):
        trainer._generate_and_score_completions(batch)


def test_random_weights_need_no_model_that_can_be_scored(train):
    config = CounterfactualConfig(control="random")
    trained = train(trainer={"model": mamba(), "credit": config})
    assert max(logged(trained, "credit/weight_std")) > 0


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=packs)])
def test_a_model_that_is_placed_by_training_is_tried_before_the_first_completion(build, monkeypatch, packed):
    tried: list[str] = []
    for name in ("check_supported", "check_trains_packed"):
        check = getattr(integration, name)
        monkeypatch.setattr(
            integration, name, lambda model, name=name, check=check, **_: tried.append(name) or check(model)
        )
    expected = ["check_supported", "check_trains_packed"][: 1 + packed]

    class Later(CounterfactualGRPOTrainer):
        def _model_is_placed(self) -> bool:
            return False

        @contextmanager
        def _queried_model(self):
            tried.append("queried")
            with super()._queried_model() as model:
                yield model

        def _generate(self, *args, **kwargs):
            assert tried[: 1 + len(expected)] == ["queried", *expected]
            return super()._generate(*args, **kwargs)

    trainer = build(Later, trainer={"packed_loss": packed}, max_steps=2)
    assert tried == []
    trainer.train()
    assert tried.count("queried") > 0
    assert [name for name in tried if name != "queried"][: len(expected)] == expected
    assert tried.count("check_supported") == 1


@pytest.mark.parametrize(
    ("kind", "device", "placed"),
    [
        (DistributedType.NO, "cpu", True), (DistributedType.MULTI_GPU, "cpu", True),
        (DistributedType.MULTI_GPU, "meta", False), (DistributedType.DEEPSPEED, "cpu", False),
        (DistributedType.FSDP, "cpu", False),
    ],
)  # fmt: skip
def test_a_model_is_placed_when_it_is_whole_on_the_device(kind, device, placed):
    trainer = object.__new__(CounterfactualGRPOTrainer)
    trainer.accelerator = SimpleNamespace(distributed_type=kind, device=torch.device("cpu"))
    trainer.model = torch.nn.Linear(2, 2, device=device)
    assert trainer._model_is_placed() == placed


def test_every_obstacle_at_once_is_named(build):
    with pytest.raises(NotImplementedError, match=re.escape("'sequence'") + ".*; nor with images in the dataset"):
        build(trainer=IMAGES, importance_sampling_level="sequence")
