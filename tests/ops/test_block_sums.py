"""Maxima and sums of blocks of logits are those of float64, by the kernel and in PyTorch."""

import pytest
import torch

from cfa_kernels.ops.block_sums import WIDTH, block_sums


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, WIDTH, 300, 5003, 9000])
def test_maxima_and_sums_of_blocks_are_those_of_float64(vocabulary, dtype, backend, device, poisoned_memory) -> None:
    whole = torch.randn(6, vocabulary + 7, generator=torch.Generator().manual_seed(vocabulary)) * 6
    whole[1, ::2] = -torch.inf
    whole[2] = -torch.inf
    whole[3, vocabulary // 2], whole[4, vocabulary // 2] = torch.nan, torch.inf
    whole[:, vocabulary:] = torch.nan
    logits = whole.to(device, dtype)[:, :vocabulary]
    maxima, sums = (part.cpu() for part in block_sums(logits, 0.7, backend))
    blocks = torch.nn.functional.pad(logits.cpu().double(), (0, -vocabulary % WIDTH), value=-torch.inf)
    blocks = blocks.unflatten(1, (-1, WIDTH))
    largest = blocks.amax(-1, keepdim=True)
    own = ((blocks - largest.nan_to_num(0, neginf=0, posinf=torch.inf)) / 0.7).exp().sum(-1)
    finite = ~sums.isnan()
    assert torch.equal(finite, ~own.isnan())
    assert torch.equal(finite[3:5].sum(1), torch.tensor([maxima.shape[1] - 1] * 2))
    assert torch.equal(maxima.double()[finite], largest[..., 0][finite])
    torch.testing.assert_close(sums, own, rtol=1e-5, atol=0, equal_nan=True)
