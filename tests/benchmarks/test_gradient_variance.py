"""The scatter of gradients is measured without bias, and every arm sees the same draws."""

import dataclasses

import numpy as np
import pytest

from benchmarks.evidence.ablation import PLAIN
from benchmarks.evidence.gradient_variance import (
    VarianceSettings,
    _gradient,
    markdown,
    products,
    relative,
    run,
    scatter,
)
from benchmarks.harness.results import Pieces
from tests.support.embedded import EVEN, SMALL, settings
from trainer.run import set_up

pytestmark = pytest.mark.slow

HEAD = {"command": "x", "environment": {"commit": "abc"}}


def test_few_draws_do_not_bias_signal_and_variance():
    """Means over many experiments of four draws each are those of the distribution."""
    random = np.random.default_rng(0)
    mean = np.array([1.0, 2.0, 0.0])
    result = [scatter(products(mean + random.normal(size=(4, 3)))) for _ in range(4000)]
    assert np.mean([f["signal"] for f in result]) == pytest.approx(5, abs=0.15)
    assert np.mean([f["variance"] for f in result]) == pytest.approx(3, abs=0.1)


def test_the_error_of_the_ratio_is_that_of_repeated_experiments():
    random = np.random.default_rng(1)
    result = [scatter(products(np.array([3.0, 0.0]) + random.normal(size=(20, 2)))) for _ in range(400)]
    assert np.mean([f["error"] for f in result]) == pytest.approx(np.std([f["ratio"] for f in result]), rel=0.2)


def test_the_interval_beside_plain_is_that_of_repeated_experiments_and_narrower_than_the_two_errors():
    """Both see the same draws; a fifth of the noise is one's own. Truth: a noise to signal of 0.74 of the other's."""
    random, held, widths, unpaired = np.random.default_rng(2), 0, [], []
    for _ in range(300):
        shared, own = random.normal(size=(24, 6)), random.normal(size=(24, 6))
        plain = np.eye(6)[0] * 3 + shared
        ours = np.eye(6)[0] * 3 + 0.8 * shared + 0.316 * own  # variance 0.74 of the other's
        result = relative(products(ours), products(plain))
        held += result["low"] <= 0.64 + 0.316**2 <= result["high"]
        widths.append(result["high"] - result["low"])
        errors = [scatter(products(v)) for v in (ours, plain)]
        unpaired.append(2 * 1.96 * 0.74 * np.hypot(*(f["error"] / f["ratio"] for f in errors)))
    assert 0.90 <= held / 300 <= 0.99
    assert np.mean(widths) < 0.7 * np.mean(unpaired)


def test_an_arm_beside_itself_or_without_a_signal_has_no_scatter_to_speak_of():
    draws = np.random.default_rng(3).normal(size=(8, 4)) + 2
    same = relative(products(3 * draws), products(draws))
    assert (same["value"], same["low"], same["high"]) == pytest.approx((1, 1, 1))
    nothing = np.array([[1.0, 0], [-1.0, 0], [0, 1.0], [0, -1.0]])
    assert relative(products(nothing), products(draws[:4])) == {"value": None, "low": None, "high": None}


def test_every_arm_sees_the_same_draws_and_is_not_computed_twice(tmp_path, monkeypatch):
    size, messages = VarianceSettings(draws=3, problems=2), list[str]()
    small = [flag for flag in SMALL if not flag.startswith(("--eval", "--device"))]
    document = run(Pieces(tmp_path, {}, HEAD), size, arms=[PLAIN, "prefix_gain"], extra=small, say=messages.append)
    assert len(messages) == 2
    assert document["arms"][PLAIN]["cosine"] == pytest.approx(1)
    assert 0 < document["arms"]["prefix_gain"]["cosine"] < 1
    monkeypatch.setattr("benchmarks.evidence.gradient_variance._gradients", None)
    again = run(Pieces(tmp_path, {}, HEAD), size, arms=[PLAIN, "prefix_gain"], extra=small, say=messages.append)
    assert again == document
    text = markdown(document | HEAD)
    assert f"| {PLAIN} |" in text
    of_plain = document["arms"]["prefix_gain"]["of_plain"]
    assert of_plain["value"] == pytest.approx(
        document["arms"]["prefix_gain"]["ratio"] / document["arms"][PLAIN]["ratio"]
    )
    assert "of_plain" not in document["arms"][PLAIN]


def test_corrections_enter_the_gradient_of_an_arm_that_asks_for_them():
    still = "--learning_rate=1e-30"
    trainer = set_up(settings("--compare_and_correct=0.3", "--credit=uniform", EVEN, "--temperature=1.2", still))
    corrected, plain = (
        _gradient(dataclasses.replace(trainer, config=config), 0, problems=2)
        for config in (trainer.config, dataclasses.replace(trainer.config, compare_and_correct=0.0))
    )
    assert np.linalg.norm(corrected - plain) > 0.01 * np.linalg.norm(plain)
