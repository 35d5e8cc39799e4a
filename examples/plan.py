"""Asks, before anything runs, how few GPUs a length fits on and what a step then holds.

python examples/plan.py [MODEL]"""

import sys

from seqtile import memory

[name] = sys.argv[1:] or ["meta-llama/Llama-3.1-8B"]  # or a config.json, its directory, a Hugging Face config
LENGTH = 1_000_000
# What a step may fill of a GPU of 80 GiB: a fifth is kept free.
setup = {"gpu_memory_gib": 64, "host_memory_gib": 1900, "offload": ("activations", "optimizer")}

for gpus in (1, 2, 4, 8, 16, 32):
    setup |= {"gpus": gpus, "sequence_parallel": gpus}
    longest = memory.longest(name, **setup)
    print(f"{gpus:>2} GPUs: {longest}")
    if longest.tokens >= LENGTH:
        print(memory.plan(name, seq_len=LENGTH, **setup))
        break
else:
    print(f"{LENGTH:,} tokens do not fit")
