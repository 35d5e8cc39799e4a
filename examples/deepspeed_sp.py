"""Trains on sequences that all GPUs share, with weights, gradients and optimizer state sharded by DeepSpeed's ZeRO-3.

torchrun --nproc-per-node 2 examples/deepspeed_sp.py [MODEL]"""

import inspect
import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import seqtile
from seqtile import sp

LENGTH = 8192  # tokens of a sequence
[name] = sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M"]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
}
deepspeed.init_distributed()
ctx = sp.initialize(torch.distributed.get_world_size())
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).train()
sp.apply_ulysses(model, ctx)
seqtile.apply_seqtile(model)
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
text = inspect.getsource(inspect)  # a long document that is at hand
sequences = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids.split(LENGTH, dim=1)
for step, ids in enumerate(sequences):  # the same on every rank of `ctx`, which keeps its own part
    ids = ids.to(engine.device)
    loss = sp.reduce_loss(engine(**sp.shard({"input_ids": ids, "labels": ids}, ctx)).loss, ctx)
    engine.backward(loss, scale_wrt_gas=False)
    engine.step()
    if ctx.rank == 0:
        print(f"step {step}: loss {loss:.4f}, gradient norm {engine.get_global_grad_norm():.4f}")
engine.save_16bit_model("runs/deepspeed_sp")  # gathers the weights; every rank calls it
model.config.save_pretrained("runs/deepspeed_sp")
torch.distributed.destroy_process_group()
