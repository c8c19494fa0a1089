"""TRL's trainer with credit and the packed loss, on the small model and problems that come with the checkout."""

import itertools
import tempfile

from datasets import Dataset
from trl import GRPOConfig

from cfa_kernels.integrations.trl import PackedGRPOTrainer
from examples.problems import generate

problems = [
    {"prompt": [{"role": "user", "content": problem.question}], "solution": str(problem.answer)}
    for problem in itertools.islice(generate("train", 1), 64)
]


def exact(completions, solution, **columns):
    """Reward a completion whose number after #### is the solution's."""
    answers = [messages[-1]["content"].rpartition("####")[2].strip() for messages in completions]
    return [float(answer == right) for answer, right in zip(answers, solution, strict=True)]


arguments = GRPOConfig(
    tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=32, num_generations=8, max_completion_length=80,
    learning_rate=2e-4, logging_steps=1, disable_tqdm=True, report_to=[], use_cpu=True, bf16=False,
)  # fmt: skip
trainer = PackedGRPOTrainer(  # was GRPOTrainer
    "trainer/embedded/assets",
    exact,
    args=arguments,
    train_dataset=Dataset.from_list(problems),
    credit="prefix_gain_positive",  # without it the step is TRL's own, faster
)
trainer.train()
for entry in trainer.state.log_history[:-1]:
    step, reward, spread, spans = (entry[key] for key in ("step", "reward", "credit/weight_std", "credit/spans_mean"))
    print(f"step {step}: reward {reward:.2f}, weights 1 ± {spread:.2f}, {spans:.1f} spans in each completion")
