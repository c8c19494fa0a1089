"""Rows of one rollout: gradients of rows fed apart, one credit for a shared token, rows that disagree, the savings."""

import pytest
import torch

from cfa_kernels.credit.assign import counterfactual_credit
from cfa_kernels.credit.config import CounterfactualConfig
from cfa_kernels.credit.loss import credited_loss
from cfa_kernels.credit.rollouts import rollout_sharing
from cfa_kernels.rows import Rows, fed_together
from cfa_kernels.scoring.packed import packed_forward, packed_policy_loss
from tests.support.models import (
    HYBRIDS,
    OTHERS,
    assert_same_gradients,
    at_least_float32,
    float64_throughout,
    gradients,
    make_model,
    naive_row,
    plain_logprobs,
    tokens,
)
from tests.support.scored import importances_of
from tests.support.small_tokenizers import encode, get_tokenizer

CHARACTERS = get_tokenizer("characters")


def ids(text: str) -> torch.Tensor:
    return torch.tensor(encode(CHARACTERS, text))


def joined(*parts: tuple[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask of parts of text."""
    texts = [ids(text) for text, _ in parts]
    return torch.cat(texts), torch.cat([torch.full((len(t),), w) for t, (_, w) in zip(texts, parts, strict=True)])


SYSTEM = "Be exact. "
START = (("look 1+1. ", 1), ("[2] ", 0), ("then 2*3. ", 1), ("[6] ", 0))
TRACES = [
    # A rollout of three traces: it goes on, it is rewritten with a summary, a part of it is sampled again.
    ("a", SYSTEM + "What?", (*START, ("so\n#### 6", 1))),
    ("a", SYSTEM + "What?", (*START[:2], ("add 2+4. ", 1), ("[6] ", 0), ("#### 6", 1))),
    ("a", SYSTEM + "Summary: 2*3 is next. ", (("2*3 is 6.\n", 1), ("[ok] ", 0), ("#### 6", 1))),
    ("b", SYSTEM + "What?", (("guess 1+2. ", 1), ("[3] ", 0), ("#### 3", 1))),
    # The prompt of this trace holds what the policy wrote in the other.
    ("b", SYSTEM + "What?guess 1+2. [3] ", (("or 1+3. ", 1), ("[4] ", 0), ("#### 4", 1))),
]  # fmt: skip
ROLLOUTS = [rollout for rollout, _, _ in TRACES]
PROMPTS = [ids(prompt) for _, prompt, _ in TRACES]
COMPLETIONS, MASKS = map(list, zip(*(joined(*parts) for _, _, parts in TRACES), strict=True))
ROWS = Rows(PROMPTS, COMPLETIONS, rollouts=ROLLOUTS)
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5])


DELTA_NETS = ["Qwen3Next", "Qwen3_5Text"]
MODELS = ["Qwen3", "Gemma3Text", "DeepseekV3", *(name for name in HYBRIDS if name not in DELTA_NETS)]


def model_of(name: str, **changes):
    """A small model, whose window, if it has one, is one of every version of transformers."""
    model = make_model(name, **(OTHERS | HYBRIDS).get(name, {}), **changes)
    if name == "Gemma3Text":
        model.set_attn_implementation("eager")
    return model


def loss_of_plain_rows(model, weights) -> torch.Tensor:
    """The on-policy loss, -A w, of rows that each take a forward of their own, summed over tokens of the policy."""
    total = 0.0
    for b, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        whole = torch.cat([prompt, completion]).to(model.device)
        logits = at_least_float32(model(input_ids=whole[None]).logits[0])
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, whole[len(prompt) :, None])[:, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        total = total - (ratio * ADVANTAGES[b] * (weights[b] * MASKS[b]).to(ratio)).sum()
    return total / sum(int(mask.sum()) for mask in MASKS)


def assert_the_loss_is_that_of_plain_rows(model, budget=None):
    weights = [torch.rand(n, generator=torch.Generator().manual_seed(n)) * 3 for n in ROWS.lengths]
    options = {"weights": weights, "mask": MASKS, "loss_type": "dapo", "token_budget": budget}
    ours = packed_policy_loss(model, ROWS, advantages=ADVANTAGES, **options).loss
    theirs = loss_of_plain_rows(model, weights)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert_same_gradients(gradients(model, ours), gradients(model, theirs))


@pytest.mark.parametrize(("name", "budget"), [*((name, None) for name in MODELS), ("Qwen3", 1), ("Bamba", 1)])
def test_gradients_of_rows_that_share_prefixes_are_those_of_rows_fed_apart(name, budget):
    assert_the_loss_is_that_of_plain_rows(model_of(name, vocab_size=128), budget)


def forks(*lengths: int) -> Rows:
    """Rows of one rollout that leave a trunk after each of its pieces, the last one at its end."""
    pieces, ends = tokens(*lengths, seed=2), tokens(*(1 + n % 5 for n in range(len(lengths))), seed=3)
    trunk = [torch.cat(pieces[: k + 1]) for k in range(len(pieces))]
    completions = [torch.cat([own, end]) for own, end in zip(trunk, ends, strict=True)]
    return Rows([tokens(5)[0]] * len(lengths), completions, rollouts=["x"] * len(lengths))


def distinct(rows: Rows) -> int:
    """Prefixes that differ: what is to be fed."""
    return len({tuple(rows.whole(b)[:n].tolist()) for b in range(len(rows)) for n in range(1, len(rows.whole(b)))})


def assert_forks_train_as_plain_rows(model, *lengths):
    """With each token of what they share fed once."""
    rows = forks(*lengths)
    forward = packed_forward(model, rows)
    assert forward.tokens_fed == distinct(rows)
    ours, theirs = forward.logprobs(), plain_logprobs(model, rows.prompts, rows.completions)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5, check_dtype=False)
    factors = [torch.rand(n, generator=torch.Generator().manual_seed(n)) - 0.3 for n in rows.lengths]
    found, expected = (
        gradients(model, sum((line * factor.to(line)).sum() for line, factor in zip(lines, factors, strict=True)))
        for lines in (ours, theirs)
    )
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_so_they_are_six_turns_deep(name):
    """With turns of one token, of as many as the 8 of a chunk of Mamba's here, and more."""
    assert_forks_train_as_plain_rows(model_of(name), 3, 1, 8, 9, 2, 16)


@pytest.mark.parametrize("name", DELTA_NETS)
def test_so_they_are_in_gated_delta_nets_which_lose_a_thousandth_in_float32_shared_or_not(name, unchecked):
    """With turns of one token, and of as many as the 64 of a chunk, and more."""
    with float64_throughout(model_of(name)) as model:
        assert_forks_train_as_plain_rows(model, 3, 1, 64, 65, 2)
    with float64_throughout(model_of(name, vocab_size=128)) as model:
        assert_the_loss_is_that_of_plain_rows(model)


def test_what_traces_share_is_fed_once_whatever_their_prompts_and_the_budget():
    assert fed_together(ROWS) == [0, 0, 0, 0, 0]  # of equal prompts, by way of the first
    assert fed_together(Rows(PROMPTS, COMPLETIONS)) == [0, 0, 1, 0, 2]
    assert fed_together(Rows(PROMPTS, COMPLETIONS, rollouts=torch.tensor([0, 1, 2, 1, 2]))) == [0, 0, 1, 0, 1]
    model = make_model("Qwen3", vocab_size=128)
    for budget in (None, 1):
        assert packed_forward(model, ROWS, token_budget=budget).tokens_fed == distinct(ROWS)
    apart = Rows(PROMPTS, COMPLETIONS)
    assert packed_forward(model, apart, token_budget=1).tokens_fed > distinct(ROWS)
    with pytest.raises(ValueError, match="rollouts has 2 rows, prompts has 5"):
        Rows(PROMPTS, COMPLETIONS, rollouts=[1, 2])


def per_turn(values):
    """An estimator whose importances are drawn by row and unit, so that rows disagree on what they share."""
    draws = torch.Generator().manual_seed(values)
    return importances_of(lambda batch: [torch.rand(len(u), generator=draws).tolist() for u in batch.units])


WAYS = [
    {}, {"normalize": "mean"}, {"weights": "bilevel"}, {"weights": "redistribute"}, {"weights": "top"},
    {"control": "inverted"}, {"control": "permuted"}, {"control": "random"}, {"weights": "identity"},
]  # fmt: skip


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_shared_token_has_one_credit(options):
    config = CounterfactualConfig.of({"estimator": per_turn(3), "units": "turns", **options})
    credit = counterfactual_credit(None, CHARACTERS, ROWS, advantages=ADVANTAGES, config=config, mask=MASKS)
    lines = credit.added or credit.weights
    turn = slice(0, len(ids(START[0][0])))
    assert torch.equal(lines[0][turn], lines[1][turn])
    assert len(lines[0][turn].unique()) == 1 or options.get("control") == "random"
    outside = [row[~mask.bool()] for row, mask in zip(lines, MASKS, strict=True)]
    assert all(row.eq(0 if credit.added else 1).all() for row in outside)
    if options == {}:  # min-max over all turns of the rollout, the shared one once with its mean
        first = [drop[0] for drop in credit.drop[:2]]
        mean = (first[0] + first[1]) / 2
        known = torch.stack([mean, *credit.drop[0][1:], *credit.drop[1][1:], *credit.drop[2]])
        share = (mean - known.min()) / (known.max() - known.min())
        assert lines[0][0].item() == pytest.approx(0.5 + 3.5 * share.item())
    if options == {"weights": "redistribute"}:  # each token once
        for rollout, advantage in (("a", 1.0), ("b", -0.5)):
            members = [b for b, own in enumerate(ROLLOUTS) if own == rollout]
            places = {
                tuple(ROWS.whole(b)[: len(PROMPTS[b]) + t + 1]): credit.advantages[b][t].item()
                for b in members for t in MASKS[b].nonzero().flatten().tolist()
            }  # fmt: skip
            assert sum(places.values()) == pytest.approx(advantage * len(places), abs=1e-4)


def test_a_trace_without_an_answer_gets_the_credit_of_what_others_share_with_it():
    parts = [(*START[:3],), (*START, ("#### 6", 1))]
    completions, masks = map(list, zip(*(joined(*row) for row in parts), strict=True))
    rows = Rows([PROMPTS[0]] * 2, completions, rollouts=[7, 7])
    model = make_model("Qwen3", vocab_size=128)
    credit = counterfactual_credit(model, CHARACTERS, rows, config=CounterfactualConfig(units="turns"), mask=masks)
    assert credit.answers[0] is None
    assert torch.equal(credit.weights[0], credit.weights[1][: rows.lengths[0]])
    assert credit.weights[0].max() == 4


def test_the_packed_step_credits_turns_of_traces_as_apart():
    model = make_model("Qwen3", vocab_size=128)
    config = CounterfactualConfig.of({"units": "turns", "estimator.mask_observation": True})
    result = credited_loss(model, CHARACTERS, ROWS, advantages=ADVANTAGES, credit=config, mask=MASKS, loss_type="dapo")
    apart = counterfactual_credit(model, CHARACTERS, ROWS, advantages=ADVANTAGES, config=config, mask=MASKS)
    torch.testing.assert_close(result.credit.weights, apart.weights, rtol=0, atol=1e-3)
    theirs = loss_of_plain_rows(model, result.credit.weights)
    assert result.loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert_same_gradients(gradients(model, result.loss), gradients(model, theirs))


@pytest.mark.parametrize(
    ("estimator", "by_token", "weights"),
    [
        ("masking", False, "range"), ("masking", True, "redistribute"),
        ("prefix_gain", True, "range"), ("prefix_gain", False, "redistribute"),
    ],
)  # fmt: skip
def test_rows_of_one_turn_each_get_the_credit_of_one_row_of_all_turns(estimator, by_token, weights):
    """Only the last of the rows has an answer; the turns before it stand in its prompt."""
    parts = (*START, ("so ", 1), ("[ok] ", 0), ("#### 6", 1))
    completion, mask = joined(*parts)
    prompts, steps, prompt = [], [], PROMPTS[0]
    for text, own in parts:
        if own:
            prompts.append(prompt)
            steps.append(ids(text))
        prompt = torch.cat([prompt, ids(text)])
    model = make_model("Qwen3", vocab_size=128)
    config = CounterfactualConfig(estimator, units="turns", weights=weights)
    whole = Rows([PROMPTS[0]], [completion])
    rows = Rows(prompts, steps, rollouts=["x"] * len(steps))
    masks = [torch.ones(n, dtype=torch.int64) for n in rows.lengths]
    values = {True: [2.0 * m for m in masks], False: torch.full((len(rows),), 2.0)}[by_token]
    one, many = (
        counterfactual_credit(model, CHARACTERS, of, advantages=value, config=config, mask=own)
        for of, value, own in ((whole, torch.tensor([2.0]), [mask]), (rows, values, masks))
    )
    column = "weights" if weights == "range" else "advantages"
    expected = getattr(one, column)[0][mask.bool()]
    torch.testing.assert_close(torch.cat(getattr(many, column)), expected, rtol=0, atol=1e-4)
    assert (expected - expected[0]).abs().max() > 0.05
    assert [len(spans) for spans in many.spans] == [0, 0, 0, 0]
    assert many.answers[:3] == [None] * 3
    assert torch.equal(steps[3][slice(*many.answers[3])], ids("6"))
    result = credited_loss(model, CHARACTERS, rows, advantages=values, credit=config, mask=masks, loss_type="dapo")
    torch.testing.assert_close(torch.cat(getattr(result.credit, column)), expected, rtol=0, atol=1e-3)


def test_a_frozen_reference_judges_in_the_models_place():
    model, reference = (make_model("Qwen3", vocab_size=128, num_hidden_layers=layers) for layers in (3, 2))
    config = CounterfactualConfig.of(
        {"units": "turns", "target": "gold", "weights": "redistribute", "weights.strength": 2.0}
    )
    columns = {"mask": MASKS, "targets": ["81"] * 5}
    result = credited_loss(
        model, CHARACTERS, ROWS, advantages=ADVANTAGES, credit=config, scorer=reference, loss_type="dapo", **columns
    )
    alone = counterfactual_credit(reference, CHARACTERS, ROWS, advantages=ADVANTAGES, config=config, **columns)
    torch.testing.assert_close(result.credit.advantages, alone.advantages, rtol=0, atol=0)
    ours = packed_policy_loss(model, ROWS, advantages=alone.advantages, mask=MASKS, loss_type="dapo").loss
    assert_same_gradients(gradients(model, result.loss), gradients(model, ours))


def test_traces_that_disagree_on_their_own_prefix_are_named_by_rollout_rows_and_turn():
    config, partly = CounterfactualConfig(units="turns"), MASKS[1].clone()
    partly[3:6] = 0
    rows = Rows(PROMPTS, COMPLETIONS, range(10, 15), ROLLOUTS)
    masks = [MASKS[0], partly, *MASKS[2:]]
    message = (
        r"rollouts 'a': rows 10 and 11 disagree on turn 0 of the former, tokens \(0, 10\): the policy wrote all 10"
    )
    with pytest.raises(ValueError, match=message):
        counterfactual_credit(None, CHARACTERS, rows, config=config, mask=masks)
    message = r"rollouts 'a': rows 10 and 11 disagree on turn 0 .* advantages are 1.0 and 0.5; a shared token has one"
    advantages = ADVANTAGES.clone()
    advantages[1] = 0.5
    with pytest.raises(ValueError, match=message):
        counterfactual_credit(None, CHARACTERS, rows, config=config, mask=MASKS, advantages=advantages)
    context = MASKS[1].clone()
    context[:10] = 0  # trained in the other row only
    estimator = per_turn(1)
    credit = counterfactual_credit(
        None, CHARACTERS, rows, config=CounterfactualConfig(estimator, units="turns"),
        mask=[MASKS[0], context, *MASKS[2:]], advantages=advantages.fill_(1.0),
    )  # fmt: skip
    assert [len(spans) for spans in credit.spans[:2]] == [3, 2]


def test_sharing_is_counted_and_a_new_tokenization_of_equal_text_is_found():
    sharing = rollout_sharing(ROWS, MASKS, CHARACTERS)
    tokens = [len(ROWS.whole(b)) for b in range(5)]
    once = [len({tuple(ROWS.whole(b)[:n]) for b in members for n in range(1, tokens[b] + 1)})
            for members in ((0, 1, 2), (3, 4))]  # fmt: skip
    assert sharing.tokens == sum(tokens)
    assert sharing.tokens_saved == sum(tokens) - sum(once)
    assert sharing.merge_compression_ratio == pytest.approx((3 + 2 + 2 + 2 + 2) / 5)
    assert sharing.retokenized == []
    words = get_tokenizer("byte-level, single digits")
    prompt, text = torch.tensor(encode(words, "How many?")), "What is the total of 12 eggs?"
    merged = torch.tensor(encode(words, text))
    letters = torch.tensor([i for letter in text for i in encode(words, letter)])
    other = torch.tensor(encode(words, "Where is it?"))
    rows = Rows([prompt] * 3, [merged, letters, other], rollouts=["x"] * 3)
    sharing = rollout_sharing(rows, [torch.ones(n) for n in rows.lengths], words)
    same = next(t for t in range(len(merged)) if merged[t] != letters[t])
    assert sharing.retokenized == [(1, 0, len(prompt) + same)]
    assert sharing.metrics()["rollouts/retokenized"] == 1


def test_scores_of_turns_deep_in_traces_are_those_of_rows_apart():
    model = make_model("Mistral", vocab_size=128, sliding_window=9)
    config = CounterfactualConfig(units="turns")
    credit = counterfactual_credit(model, CHARACTERS, ROWS, config=config, mask=MASKS)
    pad = CHARACTERS.pad_token_id
    for b in (0, 4):
        answer = credit.answers[b]
        base = naive_row(model, PROMPTS[b], COMPLETIONS[b])[slice(*answer)].sum()
        for span, drop in zip(credit.spans[b], credit.drop[b], strict=True):
            edited = COMPLETIONS[b].clone()
            edited[span.start : min(span.end, credit.answers[b].start)] = pad
            if span.end < answer.start:
                masked = naive_row(model, PROMPTS[b], edited)[slice(*answer)].sum()
                assert drop.item() == pytest.approx((base - masked).item(), abs=4e-5)


def test_a_row_that_another_continues_has_its_advantage_or_there_is_no_sign_to_go_by():
    """The turns of the former are scored in the latter, by whose advantage they would be judged."""
    model = make_model("Qwen3", vocab_size=128)
    start, mask = joined(("look 1+1. ", 1), ("[2] ", 0))
    rows = Rows([PROMPTS[0], torch.cat([PROMPTS[0], start])], [start, ids("then 2.\n#### 2")], rollouts=["a", "a"])
    options = {"config": CounterfactualConfig(units="turns"), "mask": [mask, torch.ones(len(rows.completions[1]))]}
    counterfactual_credit(model, CHARACTERS, rows, advantages=torch.ones(2), **options)
    said = r"^rollouts 'a': row 1 continues row 0, and their advantages are -1 and 1; .* one advantage"
    with pytest.raises(ValueError, match=said):
        counterfactual_credit(model, CHARACTERS, rows, advantages=torch.tensor([1.0, -1.0]), **options)


def test_rounding_is_no_disagreement_and_log_ratios_are_read_of_rows_of_a_rollout():
    model = make_model("Qwen3", vocab_size=128)
    advantages = [torch.full((len(row),), 0.3) for row in COMPLETIONS]
    advantages[1] += 3e-8
    config = CounterfactualConfig.of(
        {"units": "turns", "estimator.preselect": 0.5, "estimator.preselect_by": "progress"}
    )
    given = {name: [torch.zeros(len(row)) for row in COMPLETIONS] for name in ("old_logprobs", "ref_logprobs")}
    found = counterfactual_credit(model, CHARACTERS, ROWS, config=config, mask=MASKS, advantages=advantages, **given)
    assert any(map(len, found.spans))


def test_rules_that_pool_all_rows_count_a_rollouts_tokens_once():
    generator = torch.Generator().manual_seed(1)
    completions = [torch.randint(3, 100, (40,), generator=generator) for _ in range(6)]
    entropies = [torch.rand(40, generator=generator) + (b < 4) for b in range(6)]
    config, found = CounterfactualConfig.of({"estimator": "entropy", "weights.fraction": 0.2}), []
    for rollouts in (None, ["x"] * 4 + ["y", "z"]):
        rows = Rows([PROMPTS[0]] * 6, completions, rollouts=rollouts)
        options = {"config": config, "entropies": entropies, "advantages": torch.ones(6)}
        found.append(torch.cat(counterfactual_credit(None, CHARACTERS, rows, **options).weights))
    assert found[0].mean() == pytest.approx(0.2)
    assert torch.equal(found[0], found[1])
