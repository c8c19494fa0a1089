"""What the tests of integrations share: one thread, a trainer of TRL, and processes that start from clean imports."""

import gc
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cfa_kernels import CounterfactualConfig
from cfa_kernels.integrations.openrlhf import CounterfactualMixin
from tests.support import openrlhf_host
from tests.support.forking import server
from tests.support.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models of these sizes gain nothing by threads, and wait for them where other processes keep the cores busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def processes() -> BaseContext:
    """Starts processes by forking one that has imported the library alone and then TRL, once for all of them."""
    return server()


@pytest.fixture(scope="package")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`tests.support.trl_training.train` into a folder of its own."""
    pytest.importorskip("trl", reason="TRL is not installed")
    from tests.support import trl_training

    def run(*args: Any, **options: Any) -> Any:
        return trl_training.train(str(tmp_path_factory.mktemp("run")), *args, **options)

    gc.freeze()  # as after collection: what has been imported since, TRL's parts among it
    return run


@pytest.fixture(scope="package")
def theirs(train: Callable[..., Any]) -> Any:
    """TRL's own trainer after one step."""
    from trl import GRPOTrainer

    return train(GRPOTrainer)


@pytest.fixture(scope="package")
def mine(train: Callable[..., Any]) -> Any:
    """The same with credit."""
    return train()


@pytest.fixture(scope="module")
def openrlhf() -> Iterator[Any]:
    """`RemoteExperienceMaker`, `Experience`, `Actor` and modules from the installed package."""
    with openrlhf_host.imported() as found:
        yield found


@pytest.fixture
def build(openrlhf: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """OpenRLHF's experience maker, with credit or without, over actors that give log-probs or the group given."""
    module = sys.modules[openrlhf.Maker.__module__]
    monkeypatch.setattr(module, "apply_length_penalties", lambda experiences, args: None)

    def make(credit: CounterfactualConfig | None, group: Any = None, **changes: Any) -> Any:
        if group is None:
            actor = openrlhf.Actor(tiny_model().eval())
            actor.packing_samples, actor.temperature = False, 1.0  # set by it only where it loads the model itself
            group = openrlhf_host.Actors(actor, changes.get("actors", 1), changes.get("copies", 1))
        strategy = SimpleNamespace(args=openrlhf_host.settings(**changes))
        arguments = (group, None, None, None, SimpleNamespace(value=0.0), strategy, tiny_tokenizer())
        if credit is None:
            return openrlhf.Maker(*arguments)
        return type("Maker", (CounterfactualMixin, openrlhf.Maker), {})(*arguments, counterfactual=credit)

    return make
