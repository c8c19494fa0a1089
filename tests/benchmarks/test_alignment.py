"""Alignment: gradients by a plain forward, placebos that only reorder, figures by brute force, runs that resume."""

import json

import numpy as np
import pytest
import torch

from benchmarks.evidence import alignment
from benchmarks.evidence.alignment import ADAM, ARMS, CF, PERMUTED, PLAIN, SIZES, AlignmentSettings, Policy
from benchmarks.evidence.command import main
from cfa_kernels import packed_forward

pytestmark = pytest.mark.slow

SETTINGS = AlignmentSettings(true_groups=2, blocks=3, group=4, max_tokens=70, continuations=2)


@pytest.fixture(scope="module")
def policy():
    return Policy(SETTINGS)


@pytest.fixture(scope="module")
def group(policy):
    """A group with right and wrong completions."""
    return next(group for group in policy.groups(0, 9, count=16) if 0 < group.rewards.mean() < 1)


def advantages_of(policy, group, name, credits=None):
    forward = packed_forward(policy.model, group.rows, keep_states=True)
    return alignment.token_advantages(policy, group, forward, ARMS[name], {} if credits is None else credits, SETTINGS)


def test_a_gradient_is_that_of_plain_forwards(policy, group):
    advantages = advantages_of(policy, group, "CF")
    total = torch.zeros(())
    for prompt, completion, row in zip(group.rows.prompts, group.rows.completions, advantages, strict=True):
        logits = policy.model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        total = total + (logits.log_softmax(-1).gather(1, completion[:, None])[:, 0] * row).sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, policy.parameters)])
    actual = policy.gradient(packed_forward(policy.model, group.rows), advantages)
    assert (actual - expected).norm() < 1e-4 * expected.norm()


def test_arms_weigh_the_completions_that_they_name_and_placebos_only_reorder(policy, group):
    credits = {}
    plain, cf, right, wrong, four = (
        advantages_of(policy, group, name, credits)
        for name in (PLAIN, "CF", "CF where right", "CF where wrong", "right times 4")
    )
    advantages_of(policy, group, "CF, permuted", credits)
    for b, reward in enumerate(group.rewards.tolist()):
        weighed, other = (right, wrong) if reward else (wrong, right)
        assert torch.equal(weighed[b], cf[b])
        assert torch.equal(other[b], plain[b])
        assert torch.equal(four[b], (4 if reward else 1) * plain[b])
        own, other = (credits[id(config)].drop[b].sort().values for config in (CF, PERMUTED))
        torch.testing.assert_close(own, other)
    assert any(not torch.equal(a, b) for a, b in zip(cf, plain, strict=True))


def test_line_advantages_add_up_to_what_the_completion_gained(policy, group):
    rows = alignment.line_advantages(policy, group, 2)
    for row, ids, reward in zip(rows, group.rows.completions, group.rewards, strict=True):
        ends = [t for t, i in enumerate(ids.tolist()) if "\n" in policy.tokenizer.decode([i])]
        assert len(ends) > 1
        last = [*ends, len(ids) - 1]
        assert row[last].sum().item() == pytest.approx((reward - group.rewards.mean()).item(), abs=1e-5)


def test_figures_are_those_of_the_vectors():
    """Arms of known mean and noise: cosines by brute force, noise and aim within their own errors."""
    random, truth = np.random.default_rng(0), np.array([1.0, 0, 0, 0])
    means = {PLAIN: np.array([0.5, 0.2, 0, 0]), "CF": np.array([0.5, 0, 0, 0])}
    blocks, cosines = [], {name: [] for name in means}
    for _ in range(60):
        noise = random.normal(size=(SIZES[-1], 4))
        products = {str(size): {} for size in SIZES} | {"adam": {}}
        for name, mean in means.items():
            for size in SIZES:
                steps = (mean + noise).reshape(-1, size, 4).sum(1)
                lines = [[step @ truth, step @ truth, step @ step] for step in steps]
                products[str(size)][name] = lines
                if size == ADAM:
                    products["adam"][name] = lines
                    cosines[name] += [step @ truth / np.linalg.norm(step) for step in steps]
        blocks.append(products)
    figures = alignment.summary(blocks, 1.0)
    for name, values in cosines.items():
        assert figures[name][str(ADAM)]["cosine"] == pytest.approx(np.mean(values))
    ratio = np.mean(cosines["CF"]) / np.mean(cosines[PLAIN])
    assert figures["CF"][str(ADAM)]["ratio"] == pytest.approx(ratio)
    assert figures["CF"]["adam"]["difference"] == pytest.approx(np.mean(cosines["CF"]) - np.mean(cosines[PLAIN]))
    for name, truths in {"CF": (1, 4 / 0.25), PLAIN: (0.5 / 0.29**0.5, 4 / 0.29)}.items():
        for key, value in zip(("aim", "noise to signal"), truths, strict=True):
            assert abs(figures[name][key]["value"] - value) < 3 * figures[name][key]["error"] < 0.3 * value


def test_the_command_writes_its_tables_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(alignment, "SIZES", (1, 2, 8))
    monkeypatch.setattr(alignment, "ADAM", 2)
    command = ["alignment", "--folder", str(tmp_path), "--results", str(tmp_path), "--commit", "none"]
    command += ["--true-groups", "16", "--blocks", "3", "--arms", "CF where right", "right times 2", "ceiling"]
    command += ["--continuations", "1"]
    assert main(command) == 0
    first = json.loads((tmp_path / "evidence-alignment.json").read_text())
    assert list(first["arms"]) == [PLAIN, "CF where right", "right times 2", "ceiling"]
    assert first["arms"][PLAIN]["2"]["ratio"] == 1
    assert "| CF where right |" in (tmp_path / "evidence-alignment.md").read_text()
    monkeypatch.setattr(alignment, "packed_forward", None)  # all is known by now
    assert main(command) == 0
    assert json.loads((tmp_path / "evidence-alignment.json").read_text())["arms"] == first["arms"]


def test_a_regime_brings_its_model_its_problems_and_its_room():
    policy = Policy(AlignmentSettings(regime="idle8", group=4))
    group = next(policy.groups(0, 9, count=1))
    lines = policy.tokenizer.decode(group.rows.completions[0]).count("\n")
    assert policy.tokenizer.decode(group.problem.prompt).count("Talk 8.") == 1
    assert 8 < lines < 16
    assert policy.settings.max_tokens > 200
    with pytest.raises(ValueError, match=r"regime must be one of plain, .*, got 'idle9'"):
        AlignmentSettings(regime="idle9")
    with pytest.raises(ValueError, match=r"problems: regime='idle8' has its own, got 'x\.jsonl'"):
        AlignmentSettings(regime="idle8", problems="x.jsonl")
