"""Takes policy-gradient steps (REINFORCE, a group's mean as baseline), with log-probabilities but without logits.

python examples/policy_gradient.py [MODEL]"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import seqtile

GROUP = 16  # answers to a prompt
LENGTH = 256  # tokens of an answer, at most
[name] = sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M"]
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
seqtile.apply_seqtile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
prompt = tokenizer("Count to a hundred: one, two,", return_tensors="pt").input_ids.to(device)
sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, "num_return_sequences": GROUP}

for step in range(8):
    ids = model.eval().generate(prompt, **sampling)
    answers = ids[:, prompt.shape[1] :]
    ends = (answers == tokenizer.eos_token_id).int()
    target = answers.masked_fill(ends.cumsum(-1) > ends, -100)  # nothing behind an answer's end
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    scores = [sum(map(str.islower, text)) / max(1, len(text)) for text in texts]  # here stands your reward
    rewards = torch.tensor(scores, device=device)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    hidden = model.train().model(ids, use_cache=False).last_hidden_state[:, prompt.shape[1] - 1 : -1]
    log_probs = seqtile.linear_log_probs(hidden, model.lm_head.weight, target)  # [GROUP, tokens], 0 where -100
    loss = -(advantages[:, None] * log_probs).sum() / (target != -100).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: reward {rewards.mean():.4f}")
model.save_pretrained("runs/policy_gradient")  # loads without seqtile
