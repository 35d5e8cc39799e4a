"""Trains LoRA adapters with Hugging Face's Trainer, with the loss and the MLPs computed chunk by chunk.

python examples/trainer_lora.py [MODEL]"""

import inspect
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import seqtile

LENGTH = 4096  # tokens of a sequence
[name] = sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M"]
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
seqtile.apply_seqtile(model)  # before PEFT is as good
print(seqtile.status(model))

text = inspect.getsource(inspect)  # a long document that is at hand
sequences = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0].split(LENGTH)
arguments = TrainingArguments(
    output_dir="runs/trainer_lora",
    num_train_epochs=1,
    per_device_train_batch_size=1,
    gradient_checkpointing=True,
    learning_rate=1e-3,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    logging_steps=1,
    report_to="none",
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids} for ids in sequences])
trainer.train()
trainer.save_model()
