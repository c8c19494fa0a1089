"""`python -m benchmarks explain`: predict the parts of a training step on a GPU by a roofline.

Nothing runs on a device. Operations and bytes are counted from a model's configuration and the shape of a batch; each
part takes the longest of its operations over the rate of products, its bytes over the bandwidth, and its launches. The
table is in `docs/planning.md`.
"""

import argparse
import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks.harness.results import table
from benchmarks.harness.workloads import MODELS, head_dim

MATMUL_SHARE, COPY_SHARE = 0.73, 0.90
"""Shares of a data sheet's matrix products and bandwidth that large products and copies reach."""

# Those marked so are fitted to the run on an H100 that docs/benchmarks.md shows.

LAUNCH = 2.6e-6
"""Seconds from one short kernel to the next within a CUDA graph (fitted)."""

DECODE_SHARE, CACHE_SHARE = 0.57, 0.54
"""Shares of the bandwidth at which decoding reads weights, for 64 rows, and keys and values (fitted)."""

PLACES = 64
"""Prompts and what a step reads of the cache are a multiple of so many places."""

HOST = {"rollouts": 2e-3, "forward": 4.3e-3, "backward": 5e-3}
"""Seconds in which Python launches a layer: of the prompts', and of training's forward and backward (fitted, the last
to the second run that is shown there)."""

MERGE_BYTES = 28
"""Read and written for each weight with an adapter: its product in float32, a copy, the sum, and the copy back."""

SPAN_SEARCH = 2.6e-6
"""Seconds of the host for each token of a completion, while the device waits: spans are found, branches packed."""

SMALL_KERNELS = 14
"""Norms, rotary embeddings, gates and sums of a layer in decoding, with Liger's kernels, and others' gaps (fitted)."""

SAMPLER_PASSES = 35
"""Readings and writings of float32 logits in the time that the sampler, its sorts included, takes (fitted)."""

ATTENTION_SHARE, ATTENTION_BACKWARD_SHARE = 0.27, 0.17
"""Shares of the rate of products that tree attention reaches at completions of some 200 tokens (fitted)."""

ORDER = ("rollouts", "forward", "loss", "backward", "update", "credit", "host")
"""Of the table's sections."""

OPTIMIZER_BYTES = 40
"""Read and written for each trained weight by AdamW in float32, the gradient's norm and its clip."""

HALF, FLOAT = 2, 4
ANSWER, SPAN = 3, 12
"""Tokens of an answer, which ends its completion, and of a span."""


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU, per second, as large products and copies reach them."""

    name: str
    products: float  # multiply-adds, twice, in bfloat16
    bandwidth: float  # bytes
    memory: float  # bytes
    source: str


GPUS = {
    name: Gpu(name, tflops * MATMUL_SHARE * 1e12, tb * COPY_SHARE * 1e12, gb * 1e9, sheet)
    for name, tflops, tb, gb, sheet in (
        ("H200", 989, 4.8, 141, "NVIDIA H200 data sheet, SXM, dense"),
        ("H100", 989, 3.35, 80, "NVIDIA H100 data sheet, SXM, dense"),
        ("A100", 312, 2.039, 80, "NVIDIA A100 data sheet, SXM 80 GB, dense"),
        ("L40S", 362, 0.864, 48, "NVIDIA L40S data sheet, dense"),
        ("MI300X", 1307.4, 5.3, 192, "AMD Instinct MI300X data sheet, dense"),
    )
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a dense causal model.

    Attributes:
        layers: transformer layers.
        hidden: width of the residual stream.
        queries, keys: width of all query heads, and of all key heads, of a layer.
        inner: width of the MLP.
        vocabulary: rows of the head.
        matrices: (in, out) of every linear layer but the head.
        weights: all weights, the embedding and an untied head included.
    """

    layers: int
    hidden: int
    queries: int
    keys: int
    inner: int
    vocabulary: int
    matrices: tuple[tuple[int, int], ...]
    weights: int

    @property
    def products(self) -> int:
        """Weights that a row is multiplied by, the head left out."""
        return sum(i * o for i, o in self.matrices)

    @property
    def inputs(self) -> int:
        """Numbers that all linear layers read of a row."""
        return sum(i for i, _ in self.matrices)

    @property
    def inputs_once(self) -> int:
        """The same where queries, keys and values read their rows together, and an MLP's gate and input."""
        return self.layers * (2 * self.hidden + self.queries + self.inner)

    @property
    def outputs(self) -> int:
        """Numbers that all linear layers write of a row."""
        return sum(o for _, o in self.matrices)

    @property
    def cache_bytes(self) -> int:
        """Bytes of a row's keys and values in all layers."""
        return 2 * HALF * self.keys * self.layers

    @property
    def elementwise_bytes(self) -> int:
        """Bytes of norms, rotary embeddings, gates and sums for a row of all layers, forward."""
        return self.layers * HALF * (10 * self.hidden + 4 * (self.queries + self.keys) + 3 * self.inner)


def configuration(model: str) -> PretrainedConfig:
    """A preset's configuration by its name, or that of a `config.json` or of the folder that it is in.

    Raises:
        ValueError: neither a preset nor a file.
    """
    if model in MODELS:
        return copy.deepcopy(MODELS[model])
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model: must be one of {', '.join(MODELS)}, or a config.json; got {model!r}") from error


def sizes(config: PretrainedConfig) -> Sizes:
    """Read the sizes of a model, which gets no memory.

    Raises:
        ValueError: a model with experts, whose rows do not meet all weights.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = [name for name, module in model.named_modules() if hasattr(module, "num_experts")]
    if experts:
        raise ValueError(f"--model: experts ({experts[0]}) are not counted; name a dense model")
    head = model.get_output_embeddings()
    return Sizes(
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads * head_dim(config),
        config.num_key_value_heads * head_dim(config),
        config.intermediate_size,
        config.vocab_size,
        tuple((m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear) and m is not head),
        sum({id(weight): weight.numel() for weight in model.parameters()}.values()),
    )


@dataclass(frozen=True)
class StepShape:
    """Equally long completions with spans at even distances; `mixed` of the problems have an advantage."""

    problems: int
    group: int
    prompt: int
    completion: int
    longest: int
    spans: int
    mixed: int

    @property
    def starts(self) -> list[int]:
        """First token of each span."""
        inside = self.completion - ANSWER - 1  # before the marker
        if self.spans * SPAN > inside:
            raise ValueError(f"--spans: {self.spans} of {SPAN} tokens do not fit in {inside} tokens of reasoning")
        return [k * inside // self.spans for k in range(self.spans)]

    @property
    def rows(self) -> int:
        """Tokens that the training forward is fed: prompts once, completions but for their last tokens."""
        return self.mixed * (self.prompt + self.group * (self.completion - 1))

    @property
    def branch_rows(self) -> int:
        """Tokens from each masked span to the answer; siblings share the placeholders right behind their prompt."""
        counts = self.group * sum(self.completion - 1 - start for start in self.starts)
        return self.mixed * (counts - (self.group - 1) * SPAN * (0 in self.starts))

    @property
    def pairs(self) -> float:
        """Tokens that the tokens of the training forward see, themselves included."""
        return self.mixed * (_pairs(self.prompt, 0) + self.group * _pairs(self.completion - 1, self.prompt))

    @property
    def branch_pairs(self) -> float:
        """Tokens that the tokens of the branches see."""
        return self.mixed * self.group * sum(_pairs(self.completion - 1 - s, self.prompt + s) for s in self.starts)


def _pairs(length: int, past: int) -> float:
    return length * past + length * (length + 1) / 2


@dataclass(frozen=True)
class Part:
    """Part of a step. Its name begins with its section and a colon.

    Attributes:
        name: what it is.
        flops, moved: operations and bytes.
        bound: what makes it take its time, in words.
        launches: kernels that follow each other.
        share, reach: of the rate of products, and of the bandwidth, that its kernels reach.
        idle: seconds in which the device waits for the host.
    """

    name: str
    flops: float
    moved: float
    bound: str
    launches: int = 0
    share: float = 1.0
    idle: float = 0.0
    reach: float = 1.0

    def seconds(self, gpu: Gpu) -> float:
        """Roofline of the part."""
        products, bandwidth = gpu.products * self.share, gpu.bandwidth * self.reach
        took = max(self.flops / products, self.moved / bandwidth, self.launches * LAUNCH)
        return took + self.idle


def parts(model: Sizes, batch: StepShape, rank: int) -> list[Part]:
    """List the parts of a step in their order; `rank` is that of adapters on all linear layers, 0 trains all."""
    adapters = rank * (model.inputs + model.outputs)
    return [*_rollouts(model, batch, adapters), *_update(model, batch, adapters), *_credit(model, batch, adapters)]


def _rollouts(model: Sizes, batch: StepShape, adapters: int) -> Iterator[Part]:
    tokens, completions = batch.longest, batch.problems * batch.group
    cache = -(-batch.prompt // PLACES) * PLACES + (tokens + PLACES) / 2  # what is read of it, in the mean
    head, prompts = model.hidden * model.vocabulary, batch.problems * batch.prompt
    small = completions * model.elementwise_bytes
    if adapters:
        yield Part("rollouts: adapters merged, weights restored", 0, MERGE_BYTES * model.products, "bandwidth")
    yield Part("rollouts: prompts, once a group", 2.0 * model.products * prompts,
               HALF * model.products + prompts * model.elementwise_bytes, "products")  # fmt: skip
    yield Part("rollouts: base products and head", tokens * 2.0 * completions * (model.products + head),
               tokens * HALF * (model.products + head), "all weights are read for every token",
               reach=DECODE_SHARE)  # fmt: skip
    yield Part("rollouts: norms, rotary, gates, sums", 0, tokens * small, "shortest kernel",
               launches=tokens * SMALL_KERNELS * model.layers)  # fmt: skip
    yield Part("rollouts: keys and values", tokens * 4.0 * completions * cache * model.queries * model.layers,
               tokens * completions * cache * model.cache_bytes, "the live part of the cache, read once",
               reach=CACHE_SHARE)  # fmt: skip
    logits = FLOAT * completions * model.vocabulary
    yield Part("rollouts: sampler", 0, tokens * SAMPLER_PASSES * logits, "passes over the logits")


def _update(model: Sizes, batch: StepShape, adapters: int) -> Iterator[Part]:
    heads = 2.0 * batch.pairs * model.queries * model.layers  # of one product of attention
    yield from _rows("forward", model, adapters, batch.rows, HALF * (model.inputs_once + 2 * model.outputs))
    yield Part("forward: attention", 2 * heads, 0, "pairs of the tree", share=ATTENTION_SHARE)
    rows = batch.mixed * batch.group * batch.completion
    product = 2.0 * rows * model.hidden * model.vocabulary
    yield Part("loss: head, gradient included", (2 if adapters else 3) * product, 16.0 * rows * model.vocabulary,
               "products; strips of float32 logits")  # fmt: skip
    low = HALF * (3 * model.inputs_once + 2 * model.outputs)
    yield from _rows("backward", model, adapters, batch.rows, low, products=1 if adapters else 2, small=2.5)
    yield Part("backward: attention", 5 * heads, 0, "pairs of the tree", share=ATTENTION_BACKWARD_SHARE)
    yield Part("update: optimizer, norm", 0, OPTIMIZER_BYTES * (adapters or model.weights), "bandwidth")


def _credit(model: Sizes, batch: StepShape, adapters: int) -> Iterator[Part]:
    yield from _rows("credit", model, adapters, batch.branch_rows, HALF * (model.inputs_once + 2 * model.outputs))
    pairs = 4.0 * batch.branch_pairs * model.queries * model.layers
    yield Part("credit: attention", pairs, 0, "pairs of the branches", share=ATTENTION_SHARE)
    answers = batch.mixed * batch.group * (1 + batch.spans) * ANSWER
    yield Part("credit: keys, values, head", 2.0 * answers * model.hidden * model.vocabulary,
               2.0 * model.cache_bytes * (batch.rows + batch.branch_rows), "copies behind the tree's")  # fmt: skip
    yield Part("host: spans, packs of branches", 0, 0, "the device waits",
               idle=batch.mixed * batch.group * batch.completion * SPAN_SEARCH)  # fmt: skip


def _rows(
    name: str, model: Sizes, adapters: int, rows: int, low: float, *, products: int = 1, small: float = 1.0
) -> Iterator[Part]:
    """Yield what every pass over rows has; `low` bytes of a row are what adapters, as one operator, read and write."""
    yield Part(f"{name}: base products", products * 2.0 * model.products * rows,
               products * HALF * (model.products + rows * (model.inputs + model.outputs)), "products")  # fmt: skip
    if adapters:
        passes = 2 if name == "backward" else 1
        yield Part(
            f"{name}: adapters", passes * 2.0 * adapters * rows, low * rows, "results are read and written again"
        )
    yield Part(f"{name}: norms, rotary, gates, sums", 0, small * rows * model.elementwise_bytes, "bandwidth")


def launches(every: Sequence[Part], layers: int, gpu: Gpu) -> Iterator[Part]:
    """Yield what Python takes longer to launch than a GPU to run."""
    for name, seconds in HOST.items():
        begins = "rollouts: prompts" if name == "rollouts" else f"{name}:"
        own = sum(one.seconds(gpu) for one in every if one.name.startswith(begins))
        idle = max(layers * seconds - own, 0.0)
        yield Part(f"{name}: launched by Python", 0, 0, "the device waits", idle=idle)


def page(options: argparse.Namespace) -> str:
    """The table with what it holds for, as Markdown."""
    model, gpu = sizes(configuration(options.model)), GPUS[options.gpu]
    if not 0 <= options.mixed <= 1:
        raise ValueError(f"--mixed: must be the share of groups with an advantage, in [0, 1], got {options.mixed}")
    longest, mixed = max(options.longest, options.completion), round(options.mixed * options.problems)
    batch = StepShape(
        options.problems, options.group, options.prompt, options.completion, longest, options.spans, mixed
    )
    rank = 0 if options.full else options.rank
    every = parts(model, batch, rank)
    every = sorted([*every, *launches(every, model.layers, gpu)], key=lambda one: ORDER.index(one.name.split(":")[0]))
    rows = [[one.name, _amount(one.flops, "FLOP"), _amount(one.moved, "B"), one.bound, _ms(one.seconds(gpu))]
            for one in every]  # fmt: skip
    totals = {name: sum(one.seconds(gpu) for one in every if one.name.startswith(start))
              for name, start in (("rollouts", "rollouts:"), ("credit", "credit:"), ("step", ""))}  # fmt: skip
    rows += [[f"**{name}**", "", "", "", f"**{_ms(seconds)}**"] for name, seconds in totals.items()]
    trains = f"LoRA r = {rank} on all linear layers" if rank else "all weights train"
    return (
        f"{Path(options.model).name}, {trains}, {batch.problems} problems x {batch.group} completions, prompts of "
        f"{batch.prompt} tokens, completions of {batch.completion} (the longest of {batch.longest}), {batch.spans} "
        f"spans each, {batch.mixed} groups mixed: a tree of {batch.rows:,} rows, {batch.branch_rows:,} branch rows.\n"
        f"{gpu.name}: {gpu.products / 1e12:,.0f} TFLOP/s of bfloat16 products, {gpu.bandwidth / 1e12:.2f} TB/s "
        f"({gpu.source}, times {MATMUL_SHARE} and {COPY_SHARE}).\n\n"
        + table(["part", "operations", "bytes", "bound by", "ms"], rows)
        + f"\nCredit takes {totals['credit'] / max(batch.branch_rows, 1) * 1e6:.1f} ms for 1,000 branch rows.\n"
    )


def _amount(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}" if value else "–"


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def put_in_page(file: Path, command: str, text: str) -> None:
    """Replace the table that a page holds by the same command, between two comments.

    Raises:
        ValueError: the page has no such place.
    """
    content = file.read_text(encoding="utf-8")
    place = re.compile(rf"(<!-- {re.escape(command)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(content):
        raise ValueError(f"--write: {file} has no place for it: <!-- {command} --> and, below, <!-- end -->")
    file.write_text(place.sub(lambda match: f"{match[1]}{text}{match[2]}", content), encoding="utf-8")


def run(parser: argparse.ArgumentParser, argv: list[str], page: Callable[[argparse.Namespace], str]) -> int:
    """Print what `page` makes of the options; with `--write PAGE` also put it there. Returns the exit status."""
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page to write too, in place of its earlier table")
    options = parser.parse_args(argv)
    try:
        text = page(options)
        print(text)
        if options.write:
            at = argv.index("--write")
            put_in_page(options.write, " ".join([str(parser.prog), *argv[:at], *argv[at + 2 :]]), text)
    except ValueError as error:
        parser.error(str(error))
    return 0


def parser() -> argparse.ArgumentParser:
    """Options of the command but `--write`."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="Qwen3-1.7B", help=f"{', '.join(MODELS)}, or a config.json or its folder")
    made.add_argument(
        "--gpu", default="H200", choices=list(GPUS), help="GPU whose rates are used (default: %(default)s)"
    )
    for name, default, text in (
        ("problems", 8, "prompts of a step"),
        ("group", 8, "completions of each problem"),
        ("prompt", 110, "tokens of a prompt"),
        ("completion", 220, "tokens of a completion"),
        ("longest", 0, "tokens of the longest completion; 0: as many as --completion"),
        ("spans", 6, "spans of each completion"),
        ("rank", 32, "rank of LoRA"),
    ):
        made.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    made.add_argument("--mixed", type=float, default=1.0, help="share of groups with an advantage (default: 1)")
    made.add_argument("--full", action="store_true", help="train all weights")
    return made


def main(argv: list[str]) -> int:
    """Print the table; returns the exit status."""
    return run(parser(), argv, page)
