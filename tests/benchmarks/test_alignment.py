"""Alignment: gradients by a plain forward, placebos, figures by brute force, runs that resume."""

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.research import alignment, arms, models
from benchmarks.research.alignment import MAIN, PARTS, SIZES, AlignmentSettings, Policy
from benchmarks.research.arms import ARMS, CF, PERMUTED, PLAIN, SETS, Judged, arms_of
from benchmarks.research.command import main
from benchmarks.research.regimes import REGIMES, density
from examples.problems import generate

pytestmark = pytest.mark.slow

SETTINGS = AlignmentSettings(truth_groups=8, blocks=3, group=4, max_tokens=70, continuations=2)
LOOKED = lambda self: {"right": 0.5, "mixed": 0.5}  # noqa: E731 (a first look that finds something to learn)


@pytest.fixture(scope="module", autouse=True)
def few_problems():
    """Of the generated ones, which every policy would write out by its template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "GENERATED_PROBLEMS", 64)
        yield


@pytest.fixture(scope="module")
def policy():
    return Policy(SETTINGS)


@pytest.fixture(scope="module")
def groups(policy):
    """Completions of problems that each have right and wrong ones."""
    return [group for group in policy.groups(0, 9, count=16) if group.problems]


@pytest.fixture(scope="module")
def group(groups):
    return groups[0]


@pytest.fixture(scope="module")
def judged(policy, group):
    return Judged(policy, group)


def of_plain_forwards(policy, group, advantages):
    total = torch.zeros(())
    for prompt, completion, row in zip(group.rows.prompts, group.rows.completions, advantages, strict=True):
        logits = policy.model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / policy.temperature).log_softmax(-1).gather(1, completion[:, None])[:, 0]
        total = total + (logprobs * row).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, policy.parameters)])


@pytest.mark.parametrize("changes", [{}, {"parameters": r"layers\.1\.", "temperature": 0.7}], ids=["all", "few"])
def test_a_gradient_of_all_or_of_few_weights_is_that_of_plain_forwards(changes):
    policy = Policy(replace(SETTINGS, **changes))
    group = next(one for one in policy.groups(0, 9, count=16) if one.problems)
    judged = Judged(policy, group)
    for name in (PLAIN, "CF where right", "right times 4", *(["ceiling"] if not changes else [])):
        torch.manual_seed(0)
        expected = of_plain_forwards(policy, group, judged.token_advantages(ARMS[name]))
        torch.manual_seed(0)
        found = judged.gradient(ARMS[name])
        assert len(found) == 1 + (name == "ceiling")
        assert (found[0] - expected).norm() < 1e-4 * expected.norm(), name


def test_every_arm_gives_each_token_a_number_and_says_what_it_cost(judged):
    plain = judged.gradient(ARMS[PLAIN])
    for name in [one for names in SETS.values() for one in names]:
        rows = judged.token_advantages(ARMS[name])
        assert [len(row) for row in rows] == list(judged.groups.rows.lengths)
        assert all(row.isfinite().all() for row in rows)
        gradient = judged.gradient(ARMS[name])
        assert gradient.isfinite().all()
        assert name == PLAIN or not torch.equal(gradient, plain), name
        assert (judged.cost(ARMS[name]) == 0) == (name == PLAIN or name.startswith("right ")), name


def test_arms_weigh_the_completions_that_they_name_and_placebos_find_the_same(judged):
    plain, cf, right, wrong, four = (
        judged.token_advantages(ARMS[name])
        for name in (PLAIN, "CF", "CF where right", "CF where wrong", "right times 4")
    )
    for b, reward in enumerate(judged.groups.rewards.tolist()):
        weighed, other = (right, wrong) if reward else (wrong, right)
        assert torch.equal(weighed[b], cf[b])
        assert torch.equal(other[b], plain[b])
        assert torch.equal(four[b], (4 if reward else 1) * plain[b])
    found, dealt = judged.credit(CF), judged.credit(PERMUTED)
    assert all(map(torch.equal, found.drop, dealt.drop))
    assert not all(map(torch.equal, found.weights, dealt.weights))
    assert any(not torch.equal(a, b) for a, b in zip(cf, plain, strict=True))


def test_the_nearest_spans_have_the_credit_that_they_have_among_all(judged):
    found, near = judged.credit(CF), judged.credit(arms.NEAREST)
    assert max(map(len, found.spans)) > 3
    for every, few, drops, own in zip(found.spans, near.spans, found.drop, near.drop, strict=True):
        assert few == every[-3:]
        torch.testing.assert_close(own, drops[-3:], rtol=0, atol=1e-4)


def test_step_advantages_add_up_to_what_the_completion_gained(policy, group, judged):
    for row, ids, reward in zip(arms.ceiling(judged), group.rows.completions, group.rewards, strict=True):
        ends = [end - 1 for end, counts in arms.line_ends(ids, policy.tokenizer) if counts]
        assert len(ends) > 1
        last = [*ends, len(ids) - 1]
        assert row[last].sum().item() == pytest.approx((reward - group.rewards.mean()).item(), abs=1e-5)


def test_arms_of_ones_own_are_named_by_their_module():
    names = ["benchmarks.research.arms:CF", "examples.estimators.total_effects:TotalEffects"]
    found = arms_of(["CF", *names])
    assert list(found) == [PLAIN, "CF", *names]
    assert found[names[0]] == ARMS["CF"]
    assert found[names[1]].right.estimator.name == "total_effects"
    assert list(arms_of(["main"])) == SETS["main"]
    with pytest.raises(ValueError, match=r"arms must be among main, tokens, plain, .*, or module:name, got 'CG'"):
        arms_of(["CG"])


def test_figures_are_those_of_the_vectors():
    """Arms of known mean and noise: cosines by brute force, noise and aim within their own errors."""
    random, truth = np.random.default_rng(0), np.array([1.0, 0, 0, 0])
    parts = np.stack([truth] * PARTS)
    means = {PLAIN: np.array([0.5, 0.2, 0, 0]), "CF": np.array([0.5, 0, 0, 0])}
    means[f"CF{arms.NEAR}"] = np.array([0.5, 0.1, 0, 0])
    blocks, cosines = [], {name: [] for name in means}
    for _ in range(60):
        noise = random.normal(size=(SIZES[-1], 4))
        products = {str(size): {} for size in SIZES} | {"adam": {}}
        for name, mean in means.items():
            for size in SIZES:
                steps = (mean + noise).reshape(-1, size, 4).sum(1)
                lines = [[*parts @ step, step @ step] for step in steps]
                products[str(size)][name] = lines
                if size == MAIN:
                    products["adam"][name] = lines
                    cosines[name] += [step @ truth / np.linalg.norm(step) for step in steps]
        blocks.append(products)
    twins = random.normal(size=(2, 60, SIZES[-1], 4))  # one gradient, and draws of its own beside it, twice
    for block, (one, other) in zip(blocks, zip(*(twins + means["CF"]), strict=True), strict=True):
        for size in SIZES:
            pairs = zip(*(part.reshape(-1, size, 4).sum(1) for part in (one, other)), strict=True)
            block[str(size)]["ceiling"] = [[*parts @ (a + b) / 2, a @ b] for a, b in pairs]
        block["adam"]["ceiling"] = block[str(MAIN)]["ceiling"]
    figures = alignment.summary(blocks, parts @ parts.T)
    for size in SIZES:  # without its draws the gradient is the truth's
        assert abs(figures["ceiling"][str(size)]["cosine"] - 1) < 3 * figures["ceiling"][str(size)]["error"] < 0.5
    for name, values in cosines.items():
        assert figures[name][str(MAIN)]["cosine"] == pytest.approx(np.mean(values))
    ratio = np.mean(cosines["CF"]) / np.mean(cosines[PLAIN])
    assert figures["CF"][str(MAIN)]["ratio"] == pytest.approx(ratio)
    assert figures["CF"]["adam"]["difference"] == pytest.approx(np.mean(cosines["CF"]) - np.mean(cosines[PLAIN]))
    near, every = cosines[f"CF{arms.NEAR}"], cosines["CF"]
    pair = figures[f"CF{arms.NEAR}"][str(MAIN)]["to all spans"]
    assert pair["ratio"] == pytest.approx(np.mean(near) / np.mean(every))
    paired = np.std(np.subtract(near, every), ddof=1) / len(every) ** 0.5  # the truth is known
    assert pair["difference_error"] == pytest.approx(paired)
    for name, truths in {"CF": (1, 4 / 0.25), PLAIN: (0.5 / 0.29**0.5, 4 / 0.29)}.items():
        for key, value in zip(("aim", "noise to signal"), truths, strict=True):
            assert abs(figures[name][key]["value"] - value) < 3 * figures[name][key]["error"] < 0.3 * value


def test_figures_of_batches_that_are_smaller_than_any_follow_from_the_larger_ones():
    random, truth = np.random.default_rng(0), np.eye(4)[0]
    parts, blocks = np.stack([truth] * PARTS), []
    for _ in range(200):
        steps = {name: truth * mean + random.normal(size=(SIZES[-1], 4)) for name, mean in ((PLAIN, 0.5), ("CF", 1.0))}
        blocks.append({
            str(size): {
                name: [[*parts @ step, step @ step] for step in own.reshape(-1, size, 4).sum(1)]
                for name, own in steps.items()
            }
            for size in SIZES
        })  # fmt: skip
    large = [{key: block[key] for key in ("16", "64")} for block in blocks]
    known, found = (alignment.summary(some, parts @ parts.T)["CF"] for some in (blocks, large))
    assert str(MAIN) not in large[0]
    root = (1 + 4 / MAIN) ** -0.5, 0.5 * (0.25 + 4 / MAIN) ** -0.5  # product over the root of the mean square
    for figure, truth_of in ((found[str(MAIN)]["cosine"], root[0]), (found[str(MAIN)]["ratio"], root[0] / root[1])):
        assert figure == pytest.approx(truth_of, rel=0.05)
    assert found[str(MAIN)]["cosine"] == pytest.approx(known[str(MAIN)]["cosine"], rel=0.1)
    assert 0 < found[str(MAIN)]["ratio_error"] < 0.1


def test_groups_that_go_through_the_model_together_have_the_sum_of_their_gradients(policy, groups):
    single = groups[:2]
    prompts, completions = (
        [row for one in single for row in getattr(one.rows, name)] for name in ("prompts", "completions")
    )
    both = arms.Groups(
        arms.Rows(prompts, completions), torch.cat([one.rewards for one in single]),
        [problem for one in single for problem in one.problems], single[0].size,
    )  # fmt: skip
    for name in ("CF where right", "unscaled", "prefix gain where right, spans open"):
        apart = sum(Judged(policy, one).gradient(ARMS[name]) for one in single)
        together = Judged(policy, both).gradient(ARMS[name])
        assert (together - apart).norm() < 1e-3 * apart.norm(), name
    batches = list(policy.groups(0, 9, count=16, batch=8))
    assert len(batches) == 2
    assert sum(len(one.problems) for one in batches) == sum(len(one.problems) for one in groups)


@pytest.mark.parametrize(
    ("ratio", "error", "said"),
    [(1.5, 0.1, "credit would help here: a step from 32 completions has 1.50 (1.30 to 1.70) of"),
     (1.0, 0.04, "credit would not help here: "), (1.1, 0.1, "credit may or may not help here: ")],
)  # fmt: skip
def test_the_verdict_says_help_only_beyond_its_interval(ratio, error, said):
    one = document("plain", 1.0)
    one["arms"][alignment.CREDIT] = {str(MAIN): {"ratio": ratio, "ratio_error": error}}
    assert alignment.verdict(one).startswith(said)
    assert ("more truth_groups" in alignment.verdict(one)) == ("may or" in said)


def test_a_model_of_ones_own_is_measured_by_one_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "INSTRUCTION", "")  # which the small model has never read
    file = tmp_path / "problems.jsonl"
    rows = [{"question": one.question, "answer": one.solution()} for one in itertools.islice(generate("train", 1), 64)]
    file.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(
        alignment, "true_gradient", lambda policy, *_: torch.ones(sum(map(torch.numel, policy.parameters)))
    )
    small = ["--batch", "2", "--blocks", "2", "--block", "8", "--dtype", "float32"]
    small += ["--examples", "0", "--group", "4", "--max-tokens", "70"]
    arguments = ["own", "--folder", str(tmp_path), "--commit", "none", "--model", str(alignment.SMALL)]
    assert main([*arguments, "--problems", str(file), *small]) == 0
    out = capsys.readouterr().out
    assert re.search(r"first look: \d+% right", out)
    assert re.search(r"credit (would|may).* help here: a step from 16 completions has", out)
    assert json.loads((tmp_path / "own.json").read_text())["settings"]["parameters"] == "few"


def test_a_jackknife_is_without_each_line_and_without_each_part_of_the_truth():
    random = np.random.default_rng(0)
    lines, parts = random.normal(size=(5, 3 + 2)), 1 + random.normal(size=(3, 40)) / 4
    gram, every = parts @ parts.T, [0, 1, 2]

    def of(lines, kept):
        strength = np.mean([gram[i, j] for i, j in itertools.permutations(kept, 2)])
        return [lines[:, kept].mean() / strength**0.5, lines[:, 3].mean() - 2 * lines[:, 4].mean()]

    found = alignment._jackknife(lines, gram, lambda product, large, small: [product, large - 2 * small])
    without = [of(np.delete(lines, i, 0), every) for i in range(5)]
    expected = [of(lines, every), *without, *(of(lines, [p for p in every if p != part]) for part in every)]
    np.testing.assert_allclose(found, expected)


def test_vectors_of_a_device_meet_none_of_the_host(device):
    settings = replace(SETTINGS, truth_groups=12, batch=2, block=8, moments=0, parameters=r"layers\.1\.")
    policy = Policy(settings)
    policy.model.to(device)
    truth = torch.stack([alignment.true_gradient(policy, settings, 0)] * 3)
    chosen = arms_of(["CF", "prefix gain permuted where right, spans open", "position where right", "right times 4"])
    found = alignment._block(policy, chosen, 0, truth.to(device), dict, settings)
    assert {*found["products"]["8"]} == {*chosen}


def test_the_command_writes_its_tables_and_resumes(policy, groups, tmp_path, monkeypatch):
    monkeypatch.setattr(alignment, "SIZES", (1, 2, 4))
    monkeypatch.setattr(alignment, "MAIN", 2)
    arguments = ["alignment", "--folder", str(tmp_path), "--results", str(tmp_path), "--commit", "none"]
    arguments += ["--blocks", "2", "--arms", "CF where right", f"CF where right{arms.NEAR}", "ceiling"]
    arguments += ["--continuations", "1", "--group", "4", "--moments", "1", "--parameters", r"layers\.1\."]
    trained = policy.model.get_submodule("model.layers.1")
    truth = torch.randn(PARTS + 1, sum(p.numel() for p in trained.parameters()))
    monkeypatch.setattr(Policy, "look", LOOKED)
    drawn = lambda self, *key, count, batch: itertools.islice(itertools.cycle(groups), key[-1], key[-1] + count)  # noqa: E731
    monkeypatch.setattr(Policy, "groups", drawn)
    monkeypatch.setattr(Policy, "values", lambda self, asked, begun, count: torch.full((len(begun),), 0.5))
    monkeypatch.setattr(alignment, "true_gradient", lambda policy, settings, part: truth[-1] + truth[part] / 4)
    assert main([*arguments, "--blocks", "3"]) == 0
    (tmp_path / "pieces" / "block-1.json").unlink()  # as if it had been interrupted
    for name in ("true_gradient", "mean_squares"):  # which are kept
        monkeypatch.setattr(alignment, name, None)
    assert main(arguments) == 0  # with fewer blocks
    first = json.loads((tmp_path / "evidence-alignment.json").read_text())
    assert list(first["arms"]) == [PLAIN, "CF where right", f"CF where right{arms.NEAR}", "ceiling"]
    assert first["arms"][PLAIN]["2"]["ratio"] == 1
    written = (tmp_path / "evidence-alignment.md").read_text()
    assert "| CF where right |" in written
    assert re.search(rf"\| to all spans \| .*\n.*\n\| CF where right{arms.NEAR} \|", written)
    monkeypatch.setattr(arms, "packed_forward", None)  # all is known by now
    assert main(arguments) == 0
    assert json.loads((tmp_path / "evidence-alignment.json").read_text())["arms"] == first["arms"]


def test_a_part_of_the_truth_is_the_sum_of_its_groups_gradients(policy):
    settings = replace(SETTINGS, truth_groups=8 * PARTS, batch=8)
    groups = [one for one in policy.groups(settings.seed, 1, 0, count=8) if one.problems]
    expected = sum(of_plain_forwards(policy, one, one.rewards - one.means) for one in groups)
    found = alignment.true_gradient(policy, settings, 0)
    assert groups
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_groups_of_equal_rewards_are_left_out_of_their_batch(policy):
    rewards = [1.0, 0, 0, 0] + [1.0] * 4 + [0.0] * 8 + [0.0, 1, 1, 1] * 2
    rows = [torch.tensor([b]) for b in range(24)]
    made = [*policy.mixed([policy.problems[0]] * 24, rows, rewards, 2)]
    assert [[int(row) for row in groups.rows.completions] for groups in made] == [[0, 1, 2, 3], [], [*range(16, 24)]]
    assert [groups.rewards.tolist() for groups in made] == [rewards[:4], [], rewards[16:]]


def test_a_truth_whose_parts_do_not_agree_is_refused(tmp_path, monkeypatch, capsys):
    parts = torch.eye(PARTS)  # alike in nothing
    monkeypatch.setattr(Policy, "look", LOOKED)
    monkeypatch.setattr(alignment, "true_gradient", lambda *arguments: parts[arguments[-1]])
    assert main(["alignment", "--folder", str(tmp_path), "--results", str(tmp_path), "--commit", "none"]) == 1
    assert "truth_groups: the parts of the true gradient do not agree; raise it" in capsys.readouterr().err


def test_a_regime_brings_its_model_its_problems_and_its_room():
    policy = Policy(AlignmentSettings(regime="idle8", group=4))
    group = next(one for one in policy.groups(0, 9, count=4) if one.problems)
    lines = policy.tokenizer.decode(group.rows.completions[0]).count("\n")
    assert policy.tokenizer.decode(group.problems[0].prompt).count("Talk 8.") == 1
    assert 8 < lines < 16
    assert policy.max_tokens > 200
    with pytest.raises(ValueError, match=r"regime must be one of plain, .*, got 'idle9'"):
        AlignmentSettings(regime="idle9")
    with pytest.raises(ValueError, match=r"problems: regime='idle8' has its own, got 'x\.jsonl'"):
        AlignmentSettings(regime="idle8", problems="x.jsonl")


def document(regime, share):
    figure = {
        "cosine": 0.1, "error": 0.01, "difference": 0.0, "difference_error": 0.0, "ratio": 1.2, "ratio_error": 0.1,
    }  # fmt: skip
    ends = {"aim": {"value": 0.9, "error": 0.1}, "noise to signal": None, "cost": 0.25}
    arm = {**{str(size): figure for size in SIZES}, "adam": figure, **ends}
    command = f"python -m benchmarks evidence alignment --regime {regime}"
    made = {"settings": vars(AlignmentSettings(regime=regime)), "agreement": 0.9, "density": share}
    unknown = arm | {"adam": figure | {"ratio": math.nan}}  # an arm with a twin, whose mean square can be below 0
    return made | {"arms": {PLAIN: arm, "CF": unknown}, "command": command, "environment": {"commit": "abc"}}


def test_tables_come_from_the_results_alone(tmp_path, capsys):
    older = document("", None)
    older["arms"]["CF"] |= {"aim": 0.9}
    del older["settings"]["regime"]
    (tmp_path / "evidence-alignment.json").write_text(json.dumps(older))
    for regime, share in (("plain", 1.0), ("idle8", 0.3)):
        (tmp_path / f"evidence-alignment-{regime}.json").write_text(json.dumps(document(regime, share)))
    (tmp_path / "evidence-other.json").write_text("{}")
    assert main(["tables", "--results", str(tmp_path), "--commit", "none"]) == 0
    assert "evidence-alignment.json: was made by another form" in capsys.readouterr().err
    assert not (tmp_path / "evidence-alignment.md").exists()
    text = (tmp_path / "evidence-alignment-idle8.md").read_text()
    assert "Regime `idle8`, 30% of its tokens in steps and answer." in text
    assert "| CF | 0.100 | 0.100 | 0.100 | 0.100 | 1.20 ± 0.10 | +0.000 ± 0.000 | – | 0.90 ± 0.10 | – | 0.25 |" in text


def test_density_is_the_share_of_tokens_that_steps_have(policy):
    shares = [density(REGIMES[name], policy.tokenizer, 20) for name in ("plain", "idle8", "idle24")]
    assert shares[0] == 1 > 0.6 > shares[1] > shares[2] > 0.05
