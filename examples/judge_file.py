"""Judge the completions of a file by a model; write a page of them."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfa_kernels import Rows, counterfactual_credit
from trainer.report.page import page_of
from trainer.report.runs import sample_of

name = "trainer/embedded/assets"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)


def encode(question: str) -> torch.Tensor:
    """Encode a question as the model's chat template asks it: (L,) token ids."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"][0]


file = Path("examples/completions.jsonl")  # or yours: question, answer and completion, a JSON object a line
lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
completions = [tokenizer(line["completion"], return_tensors="pt")["input_ids"][0] for line in lines]
rows = Rows([encode(line["question"]) for line in lines], completions)
credit = counterfactual_credit(
    model, tokenizer, rows, advantages=torch.ones(len(lines)), config={"estimator": "masking"}
)

records = []
for b, (line, ids) in enumerate(zip(lines, completions, strict=True)):
    spans = []
    for (start, end), drop in zip(credit.spans[b], credit.drop[b].tolist(), strict=True):
        spans.append({"start": start, "end": end, "drop": drop})
        print(f"completion {b}  {tokenizer.decode(ids[start:end]):<9}  drop {drop:z6.2f} nats")
    answer = credit.answers[b]
    records.append({
        "tokens": [tokenizer.decode([i]) for i in ids], "spans": spans,
        "credit": "masking", "weights": credit.weights[b].tolist(),
        "answer": answer and answer._asdict(), "question": line["question"], "reference": line["answer"],
        "correct": line["completion"].rpartition("####")[2].strip() == line["answer"],
    })  # fmt: skip
page = Path("runs/judged.html")
page.parent.mkdir(exist_ok=True)
page.write_text(page_of(map(sample_of, records), "Judged completions"), "utf-8")
print(f"open {page}")
