"""Trains with Hugging Face's Trainer on sequences that all GPUs share.

torchrun --nproc-per-node 2 examples/trainer_sp.py [MODEL]"""

import inspect
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import seqtile
from seqtile import sp


class SequenceParallelTrainer(sp.SequenceParallelTrainerMixin, Trainer):
    pass


LENGTH = 8192  # tokens of a sequence
[name] = sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M"]
arguments = TrainingArguments(  # before sp.initialize: it starts torch.distributed
    output_dir="runs/trainer_sp",
    num_train_epochs=1,
    per_device_train_batch_size=1,
    gradient_checkpointing=True,
    learning_rate=1e-4,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    logging_steps=1,
    report_to="none",
)
ctx = sp.initialize(arguments.world_size)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
seqtile.apply_seqtile(model)
text = inspect.getsource(inspect)  # a long document that is at hand
sequences = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0].split(LENGTH)
dataset = [{"input_ids": ids, "labels": ids} for ids in sequences]
trainer = SequenceParallelTrainer(model, arguments, train_dataset=dataset, sequence_parallel=ctx)
trainer.train()
