"""Every door to credit is shut unless a preset or an estimator is named. A new host, or the program, adds its door."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cfa_kernels import CounterfactualConfig, counterfactual_credit, credited_loss
from cfa_kernels.credit.config import as_config
from cfa_kernels.integrations import openrlhf
from cfa_kernels.integrations.credit import OFFERS
from cfa_kernels.integrations.prime_rl import CounterfactualMixin
from cfa_kernels.integrations.trl_async import CounterfactualAsyncMixin
from tests.support.openrlhf_host import Host
from trainer.cli import parse
from trainer.config import TrainConfig
from trainer.one_page import Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMED = {"estimator": "prefix_gain"}


class Standing:
    """As a host's class is, as far as the mixins read it."""

    action_loss_type = "rl"
    accelerator, args = SimpleNamespace(num_processes=1), SimpleNamespace(seed=0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a host takes."""


def by_trl(credit: dict[str, Any], folder: Path) -> CounterfactualConfig:
    pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)
    from datasets import Dataset
    from trl import GRPOConfig

    from cfa_kernels.integrations.trl import PackedGRPOTrainer
    from tests.support.tiny import tiny_model, tiny_tokenizer

    arguments = GRPOConfig(str(folder), use_cpu=True, bf16=False, report_to=[])
    data = {"train_dataset": Dataset.from_dict({"prompt": ["3"] * 8}), "processing_class": tiny_tokenizer()}
    given = {"credit": CounterfactualConfig.of(credit)} if credit else {}
    return PackedGRPOTrainer(tiny_model(), lambda **_: [0.0], args=arguments, **data, **given).credit  # type: ignore[no-any-return]


def by_async_grpo(credit: dict[str, Any], folder: Path) -> CounterfactualConfig:
    given = {"credit": CounterfactualConfig.of(credit)} if credit else {}
    return type("Mine", (CounterfactualAsyncMixin, Standing), {})(**given).credit  # type: ignore[no-any-return]


def by_prime_rl(credit: dict[str, Any], folder: Path) -> CounterfactualConfig:
    own = {"counterfactual": CounterfactualConfig.of(credit)} if credit else {}
    return type("Mine", (CounterfactualMixin, Standing), own)(None, SimpleNamespace(score=None))._config  # type: ignore[no-any-return]


def by_openrlhf(credit: dict[str, Any], folder: Path) -> CounterfactualConfig:
    own = {"counterfactual": credit} if credit else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openrlhf, "require", lambda *args: None)
        return type("Mine", (openrlhf.CounterfactualMixin, Host), own)()._config  # type: ignore[no-any-return]


def by_verls_section(credit: dict[str, Any], folder: Path) -> CounterfactualConfig:
    """Read the configuration of the documentation as the launcher of verl does."""
    whole = yaml.safe_load((DOCS / "verl_gsm8k.yaml").read_text(encoding="utf-8"))
    return as_config(whole["counterfactual"] | credit)


def by_the_program(credit: dict[str, Any], folder: Path) -> CounterfactualConfig:
    flags = [f"--{path}={value}" for path, value in credit.items()]
    return TrainConfig(**vars(parse(flags, prog="cfa-train"))).counterfactual()


DOORS: dict[str, Callable[[dict[str, Any], Path], CounterfactualConfig]] = {
    "TRL": by_trl, "TRL, AsyncGRPO": by_async_grpo, "prime-rl": by_prime_rl, "OpenRLHF": by_openrlhf,
    "verl": by_verls_section, "cfa-train": by_the_program, "as_config": lambda credit, _: as_config(credit),
    "one_page.py": lambda credit, _: as_config(Settings(**({"credit": NAMED["estimator"]} if credit else {})).credit),
}  # fmt: skip
"""From options of credit by path, none for a user who names nothing, to the configuration that a host trains with."""


@pytest.mark.parametrize("door", DOORS)
def test_there_is_no_credit_unless_an_estimator_or_a_preset_is_named(tmp_path, door):
    assert DOORS[door]({}, tmp_path).control == "off"
    named = DOORS[door](NAMED, tmp_path)
    assert (named.control, named.estimator.name) == (None, "prefix_gain")


def test_every_host_has_its_door_and_a_loop_of_ones_own_must_name_credit():
    hosts = {host.partition(", ")[0] for host in OFFERS if not host.startswith("your loop")}
    assert DOORS.keys() >= hosts, "add the host's door to DOORS"
    for function, name in ((counterfactual_credit, "config"), (credited_loss, "credit")):
        assert inspect.signature(function).parameters[name].default is inspect.Parameter.empty
