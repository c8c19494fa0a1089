"""A reward of your own in the training program: right answers, and a little for short ones."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def is_short(completions, **columns):
    """Reward a completion of at most four lines; `columns` has the columns of the data, among them `answer`."""
    return [float(text.count("\n") < 4) for text in completions]


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp()) / "run"
    rewards = ["--reward_funcs", "exact_match", "examples.own_reward:is_short", "--reward_weights", "1", "0.1"]
    settings = ["--max_steps=2", "--eval_problems=32", f"--output_dir={folder}"]
    subprocess.run([sys.executable, "-m", "trainer", *rewards, *settings], check=True)
    for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
        metrics = json.loads(line)
        if "reward" in metrics:
            right, short = (metrics[f"rewards/{name}/mean"] for name in ("exact_match", "is_short"))
            print(f"step {metrics['step']}: reward {metrics['reward']:.2f} = {right:.2f} + 0.1 * {short:.2f}")
