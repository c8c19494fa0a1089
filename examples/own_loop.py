"""Credit and loss in a loop of your own, from token ids; prints tokens beside their weight."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfa_kernels import Rows, counterfactual_credit, packed_policy_loss

name = "trainer/embedded/assets"  # the small model of the checkout; any causal model of the hub will do
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
question = {"role": "user", "content": "Mia has $93. Mia buys 3 hats for $6 each. How many dollars does Mia have left?"}
prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")["input_ids"][0]
texts = [f"The hats cost 3*6=18 dollars.\nThat leaves 93-18={n} dollars.\n#### {n}" for n in (75, 85)]
completions = [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts]  # or as you sample them
advantages = torch.tensor([1.0, -1.0])  # one for each completion
rows = Rows([prompt] * 2, completions)  # without padding
credit = counterfactual_credit(model, tokenizer, rows, advantages=advantages)  # credit.weights: a tensor per completion
loss, metrics, logprobs = packed_policy_loss(model, rows, None, advantages, weights=credit.weights)
loss.backward()
for start, end in [*credit.spans[0], credit.answers[0]]:
    print(tokenizer.decode(completions[0][start:end]), credit.weights[0][start:end].tolist())
