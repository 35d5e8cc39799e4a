"""Trains on sequences that all GPUs share, with weights, gradients and optimizer state sharded by FSDP2.

torchrun --nproc-per-node 2 examples/fsdp2_sp.py [MODEL]"""

import inspect
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from seqtile import apply_seqtile, sp

LENGTH = 8192  # tokens of a sequence
[name] = sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M"]
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = dist.init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
ctx = sp.initialize(mesh=mesh)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).train()
sp.apply_ulysses(model, ctx, batches="whole")
apply_seqtile(model)
model.gradient_checkpointing_enable()
for module in (*model.model.layers, model):
    fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids = AutoTokenizer.from_pretrained(name)(inspect.getsource(inspect), return_tensors="pt").input_ids[0]
sequences = [{"input_ids": part, "labels": part} for part in ids.split(LENGTH)]
sampler = DistributedSampler(sequences, ctx.data_parallel_size, ctx.data_parallel_rank, shuffle=False)
for step, batch in enumerate(DataLoader(sequences, sampler=sampler)):  # the same for all ranks of a group
    loss = model(**{name: ids.to(device) for name, ids in batch.items()}).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    if ctx.rank == 0:
        print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.4f}")
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # on every rank
if dist.get_rank() == 0:
    model.save_pretrained("runs/fsdp2_sp", state_dict=whole)  # loads without seqtile
dist.destroy_process_group()
