"""An estimator of your own beside masking: a calculation matters if its result is read again."""

import re

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfa_kernels import Batch, CounterfactualConfig, Importances, Rows, counterfactual_credit

name = "trainer/embedded/assets"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)


def read_again(model, batch: Batch) -> Importances:
    """Count how often the result of each unit, what follows its last `=`, occurs in the rest of the completion."""
    rows = []
    for units, completion in zip(batch.units, batch.rows.completions, strict=True):
        results = [tokenizer.decode(completion[unit.start : unit.end]).rpartition("=")[2] for unit in units]
        rests = [tokenizer.decode(completion[unit.end :]) for unit in units]
        counts = [len(re.findall(rf"\b{result}\b", rest)) for result, rest in zip(results, rests, strict=True)]
        rows.append(torch.tensor(counts, dtype=torch.float32))
    return Importances(rows)


question = "Tom has $93. The shop is 7 miles away. Tom buys 3 hats for $6 each. How many dollars does Tom have left?"
messages = [{"role": "user", "content": question}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"][0]
text = "The way is 7*2=14 miles.\nThe hats cost 3*6=18 dollars.\nThat leaves 93-18=75 dollars.\n#### 75"
completion = tokenizer(text, return_tensors="pt")["input_ids"][0]
rows, advantages = Rows([prompt], [completion]), torch.tensor([1.0])

for title, config in {"masking": CounterfactualConfig(), "read again": CounterfactualConfig(read_again)}.items():
    credit = counterfactual_credit(model, tokenizer, rows, advantages=advantages, config=config)
    for span in credit.spans[0]:
        weight = credit.weights[0][span.end - 1].item()
        print(f"{title:<10}  {tokenizer.decode(completion[span.start : span.end]):<8}  weight {weight:.2f}")
