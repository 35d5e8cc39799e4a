"""Trains by TRL's GRPO on a long prompt and its answers, which all GPUs share.

torchrun --nproc-per-node 2 examples/grpo_sp.py [MODEL]"""

import inspect
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from seqtile import apply_seqtile, sp
from seqtile.integrations.trl import apply_seqtile_to_trl


class SequenceParallelGRPOTrainer(sp.SequenceParallelTrainerMixin, GRPOTrainer):
    pass


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(completion.count("e")) for completion in completions]


LENGTH = 8192  # tokens of a prompt
[name] = sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M"]
on_cpu = {"use_cpu": True, "bf16": False, "ddp_backend": "gloo"} if not torch.cuda.is_available() else {}
options = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 32, "max_steps": 6}
arguments = GRPOConfig("runs/grpo_sp", **options, **on_cpu, learning_rate=1e-5, logging_steps=1, report_to="none")
ctx = sp.initialize(arguments.world_size)
tokenizer = AutoTokenizer.from_pretrained(name)
prompt = tokenizer.decode(tokenizer(inspect.getsource(inspect)).input_ids[:LENGTH])
dataset = Dataset.from_list([{"prompt": prompt}] * 8)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
apply_seqtile(model, loss=False)  # the MLPs
apply_seqtile_to_trl()  # the head: each rank computes the log-probabilities of its own tokens
trainer = SequenceParallelGRPOTrainer(
    model, reward, arguments, dataset, processing_class=tokenizer, sequence_parallel=ctx
)
trainer.train()
trainer.save_model("runs/grpo_sp/model")
