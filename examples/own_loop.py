"""Credit and loss in a loop of your own, from token ids; prints tokens beside their weight."""

from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfa_kernels import Rows, credited_loss

name = str(files("cfa_trainer") / "embedded/assets")  # a small model that is installed, too; take any causal model
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
question = {"role": "user", "content": "Mia has $93. Mia buys 3 hats for $6 each. How many dollars does Mia have left?"}
prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")["input_ids"][0]
texts = [f"The hats cost 3*6=18 dollars.\nThat leaves 93-18={n} dollars.\n#### {n}" for n in (75, 85)]
completions = [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts]  # or as you sample them
rows = Rows([prompt] * 2, completions)  # without padding
advantages = torch.tensor([1.0, -1.0])  # one for each completion
step = credited_loss(model, tokenizer, rows, advantages=advantages, credit="prefix_gain_positive", loss_type="dapo")
step.loss.backward()
for start, end in step.credit.spans[0]:
    print(tokenizer.decode(completions[0][start:end]), f"weight {step.credit.weights[0][end - 1]:.2f}")
