"""Let the policy rewrite its wrong completions next to correct siblings, after IBPO (arXiv 2605.16302).

    cfa-train --config ibpo, which names examples.ibpo:compare_and_correct

Our reading of its abstract and public notes; there is no code. A wrong completion y is put before the policy with the
nearest correct sibling, and one correction y^ is sampled. If y^ is correct, y's reward grows by lambda rho (`BONUS`)
before the group is normalised, and tokens that the alignment of y and y^ leaves unchanged get no credit (m_t = 0). A
wrong correction does nothing, which the notes leave open: a policy that copies its wrong attempt edits no token, and an
empty m would spare the attempt every gradient.
"""

from dataclasses import replace
from typing import Any

import torch

from cfa_kernels.estimators.siblings import correct_siblings, edited_tokens
from cfa_kernels.model.parts import causal_lm, context_length

TEMPLATE = (
    "{question}\n\nThis attempt is wrong:\n{attempt}\n\nThis is correct:\n{reference}\n\n"
    "Write the attempt again, corrected. Keep what is right in it and change only what is wrong."
)
BONUS = 0.3  # lambda times rho
CORRECT = 0.5  # least reward of a correct completion
_STREAM = 1  # at the end of a sample's key: its correction draws its own numbers


def compare_and_correct(trainer: Any, batch: Any, shaped: Any) -> Any:
    """Let the policy correct the wrong ones of B completions, in groups that hold a correct one, in one batch.

    Truncated completions that the loss omits are not corrected, nor those without a reward, nor those whose prompt for
    correction is longer than the context allows (`corrections/too_long`). Each corrected sample gets a note
    `correction`: the text and whether it is `right`.

    Args:
        trainer, batch: setup of the run, and the step's samples.
        shaped: result without corrections, of which this returns a changed copy.

    Raises:
        FloatingPointError: logits or rewards of corrections are not finite.
        ValueError: a reward function returns something other than rewards; the message names the samples.
    """
    config, rollouts, limit = trainer.config, batch.rollouts, _longest_prompt(trainer)
    ids, texts = rollouts.rows.completions, rollouts.texts
    siblings = correct_siblings(ids, torch.arange(len(ids)) // config.num_generations, batch.rewards >= CORRECT)
    left_out = rollouts.truncated & config.mask_truncated_completions | batch.rewards.isnan()
    prompts = {
        b: correction_prompt(trainer, batch.rows[b]["question"], texts[b], texts[near[0]])
        for b, near in enumerate(siblings)
        if near and not left_out[b]
    }
    fitting = [b for b, prompt in prompts.items() if limit is None or len(prompt) <= limit]

    raised, edits = batch.rewards.clone(), [torch.ones(len(row)) for row in ids]
    notes: dict[int, dict[str, Any]] = {}
    metrics = {
        "corrections/fraction": len(fitting) / len(ids),
        "corrections/too_long": float(len(prompts) - len(fitting)),
        "corrections/tokens": 0.0,
    }
    if fitting:
        keys = [(*batch.keys[b], _STREAM) for b in fitting]
        names = [f"the correction of sample {b}" for b in fitting]
        corrected = trainer.sample(keys, [prompts[b] for b in fitting], names)
        edited = list[torch.Tensor]()
        rewards = trainer.reward([batch.rows[b] for b in fitting], corrected, names, keys).rewards
        right = (rewards >= CORRECT).tolist()
        for b, text, is_right, row in zip(fitting, corrected.texts, right, corrected.rows.completions, strict=True):
            notes[b] = {"correction": {"completion": text, "right": is_right}}
            if is_right:
                raised[b] += BONUS
                edits[b] = edited_tokens(ids[b], row)
                edited.append(edits[b])
        metrics |= {
            "corrections/tokens": float(corrected.tokens()),
            "corrections/right_fraction": sum(right) / len(right),
            "corrections/clipped_ratio": corrected.truncated.float().mean().item(),
        }
        if edited:
            metrics["corrections/edited_fraction"] = torch.cat(edited).double().mean().item()
    return replace(shaped, rewards=raised, edits=edits, metrics=metrics, notes=notes)


def correction_prompt(trainer: Any, question: str, attempt: str, reference: str) -> list[int]:
    """Encode the prompt that asks for a correction: `TEMPLATE` filled, then as any other prompt."""
    return trainer.encode(TEMPLATE.format(question=question, attempt=attempt, reference=reference))


def _longest_prompt(trainer: Any) -> int | None:
    context = context_length(causal_lm(trainer.policy))
    return None if context is None else context - trainer.config.max_completion_length
