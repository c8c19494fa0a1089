"""Hidden states, heads and kept ids, and plain log-probs over the kept ids."""

import math
import random

import torch

B, T, H, V = 3, 5, 24, 523
KINDS = {  # of what each token keeps: ids are below a limit; some tokens have none, and are over the whole vocabulary
    "narrow": (90, False),
    "wide": (V, False),
    "mixed": (V, True),
}
TRANSFORMS = [{}, {"bias": True, "softcap": 3.0, "logit_scale": 0.6, "temperature": 0.7}]


def example(kind, dtype=torch.float64, device="cpu", *, bias=False, seed=0, **transform):
    """Hidden states (B * T, H), head, targets, options, and lists of kept ids, unsorted and with repetitions."""
    limit, some_without = KINDS[kind]
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    hidden, head, shift = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for shape in ((B * T, H), (V, H), (V,))
    )
    lists = []
    for n in range(B * T):
        ids = [draw.randrange(limit) for _ in range(draw.choice([1, 2, 7, 40]))]
        lists.append([] if some_without and n % 3 == 1 else [*ids, ids[0]])
    targets = torch.tensor([draw.choice(ids or range(V)) for ids in lists], device=device)
    return hidden, head, targets, transform | ({"bias": shift} if bias else {}), lists


def dense(hidden, head, targets, lists, dtype, **options):
    """Log-probs of targets, and entropies, of a softmax over all logits, of which those that are not kept are -inf."""
    logp = dense_rows(hidden, head, lists, dtype, **options)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def dense_rows(hidden, head, lists, dtype, *, bias=None, temperature=1.0, softcap=None, logit_scale=1.0):
    logits = hidden.to(dtype) @ head.to(dtype).T + (0 if bias is None else bias.to(dtype))
    logits = logit_scale * logits.to(torch.promote_types(dtype, torch.float32))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    closed = torch.tensor([[bool(ids) and v not in ids for v in range(V)] for ids in map(set, lists)])
    closed = closed.to(logits.device)
    return (logits / temperature).masked_fill(closed, -math.inf).log_softmax(-1).masked_fill(closed, -1e4)


def leaves_of(hidden, head, options, dtype=None):
    tensors = [hidden, head, *([options["bias"]] if "bias" in options else [])]
    leaves = [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors]
    return leaves, options | ({"bias": leaves[2]} if "bias" in options else {})
