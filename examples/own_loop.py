"""Trains a model in a loop of your own, with its loss and MLPs computed chunk by chunk.

python examples/own_loop.py [MODEL]"""

import inspect
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import seqtile

LENGTH = 4096  # tokens of a sequence
[name] = sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M"]
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device).train()
model.gradient_checkpointing_enable()
seqtile.apply_seqtile(model)
print(seqtile.status(model))

text = inspect.getsource(inspect)  # a long document that is at hand
sequences = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids.split(LENGTH, dim=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step, ids in enumerate(sequences):
    ids = ids.to(device)
    with torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.4f}")
model.save_pretrained("runs/own_loop")  # loads without seqtile
