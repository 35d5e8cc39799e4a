"""Trains with all of a layer but attention computed chunk by chunk, heads in groups, and layer inputs in host memory.

python examples/whole_layers.py [MODEL]"""

import inspect
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import seqtile
from seqtile import offload

LENGTH = 8192  # tokens of a sequence
[name] = sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M"]
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device).train()
seqtile.apply_seqtile(model, layer=True, head_groups="auto")
offload.enable(model)  # checkpoints the layers; without a GPU it only does that, with a warning
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
model.save_pretrained("runs/whole_layers")  # loads without seqtile
