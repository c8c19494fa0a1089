"""Quantised bases: layers that round in halves are checked in float32, and a wrong tree is refused on them too."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.nn import functional

from cfa_kernels import Rows, check_model, packed_logprobs
from cfa_kernels.model.quantised import product_dtype
from cfa_kernels.scoring.access import InProcess
from tests.support.budget import assert_within_budget
from tests.support.models import make_model

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Int8Linear(nn.Module):
    """A layer of integers and a scale for each output, which multiplies in bfloat16 whatever comes in."""

    takes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("integers", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in self.takes:
            raise RuntimeError(f"expected one of {self.takes}, got {x.dtype}")
        return functional.linear(x.bfloat16(), self.integers * self.scale).to(x.dtype)


class HalvesOnly(Int8Linear):
    """A kernel that takes bfloat16 only, as those of GPTQ and AWQ take halves."""

    takes = (torch.bfloat16,)


class Mixing(Int8Linear):
    """A layer whose result for a token depends on the token before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.5 * x.roll(1, -2))


def quantised(kind: type = Int8Linear, adapters: str = "trained", hidden: int = 128) -> nn.Module:
    """A model in bfloat16 with quantised MLPs and adapters on its attention, at zero or not."""
    torch.manual_seed(1)
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "head_dim": hidden // 4, "num_hidden_layers": 4}
    model = make_model("Qwen3", **shape, initializer_range=0.1).cpu().bfloat16()
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, kind(getattr(layer.mlp, name)))
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=adapters == "fresh")
    return get_peft_model(model, config).eval()


@pytest.mark.parametrize(
    ("kind", "adapters", "hidden"),
    [
        (Int8Linear, "fresh", 64), (Int8Linear, "trained", 256), (HalvesOnly, "fresh", 128),
    ],
)  # fmt: skip
def test_layers_that_round_in_halves_are_accepted_whatever_their_adapters(kind, adapters, hidden):
    model = quantised(kind, adapters, hidden)
    before = [(name, vars(module).get("forward")) for name, module in model.named_modules()]
    check_model(model)
    assert [(name, vars(module).get("forward")) for name, module in model.named_modules()] == before


@pytest.mark.parametrize("adapters", ["fresh", "trained"])
def test_a_wrong_tree_is_refused_on_a_quantised_base_too(adapters):
    with pytest.raises(NotImplementedError, match="does not compute the same in a packed tree"):
        check_model(quantised(Mixing, adapters))
    model = quantised(adapters=adapters)
    model.get_base_model().model.layers[0].self_attn.register_forward_hook(
        lambda _, args, out: (out[0] + 0.3 * out[0].roll(1, 1), *out[1:])
    )
    with pytest.raises(NotImplementedError, match="does not compute the same in a packed tree"):
        check_model(model)


def test_scores_of_quantised_layers_round_as_those_layers_do():
    model = quantised()
    base = model.get_base_model()
    assert InProcess(model).dtype == torch.bfloat16
    base.float()  # what kbit training does to norms and embeddings
    assert base.dtype == torch.float32
    assert product_dtype(base) == torch.bfloat16
    for layer in base.modules():
        if isinstance(layer, Int8Linear):
            layer.compute_dtype = torch.float32
    assert InProcess(model).dtype == torch.float32
    assert InProcess(make_model("Qwen3")).dtype == torch.float32


FOUR_BITS = {
    "nf4 in bfloat16": {}, "double": {"bnb_4bit_use_double_quant": True}, "fp4": {"bnb_4bit_quant_type": "fp4"},
    "float16": {"bnb_4bit_compute_dtype": torch.float16},
    "stored in bfloat16": {"bnb_4bit_quant_storage": torch.bfloat16},
    "float32": {"bnb_4bit_compute_dtype": torch.float32},
}  # fmt: skip


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("adapters", ["fresh", "trained"])
@pytest.mark.parametrize("kind", [*FOUR_BITS, "8 bit"])
def test_qlora_is_accepted_and_its_tree_is_as_near_as_the_models_own_two_ways(tmp_path, kind, adapters, prepared):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16, **FOUR_BITS.get(kind, {})}
    bits = {"load_in_8bit": True} if kind == "8 bit" else {"load_in_4bit": True, **four}
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32, "vocab_size": 512}
    make_model("Qwen3", **shape, initializer_range=0.05).cpu().bfloat16().save_pretrained(tmp_path)
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, device_map="cpu", quantization_config=transformers.BitsAndBytesConfig(**bits)
    )
    if prepared:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=adapters == "fresh")
    torch.manual_seed(0)
    model = get_peft_model(model, config).eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_model(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), weights[name].view(torch.uint8)), name  # nan among packed bits
    ids = torch.randint(5, 512, (6, 40), generator=torch.Generator().manual_seed(0))
    base = model.get_base_model()

    def own(rows: torch.Tensor, attention: str) -> torch.Tensor:
        base.set_attn_implementation(attention)
        return model(input_ids=rows).logits.float().log_softmax(-1)[:, 9:-1].gather(2, rows[:, 10:, None])[..., 0]

    with torch.no_grad():
        eager, sdpa = own(ids, "eager"), own(ids, "sdpa")
        alone = torch.cat([own(row[None], "sdpa") for row in ids])  # LLM.int8 treats columns by the rows around
        tree = torch.stack(packed_logprobs(model, Rows(list(ids[:, :10]), list(ids[:, 10:]))))
    furthest = max((eager, alone), key=lambda other: (other - sdpa).abs().max())
    assert_within_budget(tree, furthest, sdpa.double())
    loss = -torch.stack(packed_logprobs(model, Rows(list(ids[:, :10]), list(ids[:, 10:])))).mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
