"""Trains LoRA adapters on documents of many lengths, packed into full rows in which no document sees another.
Needs one GPU (Qwen3-8B: 80 GB, predicted), `pip install 'trl==1.16.*' peft`, and documents as JSONL.

python examples/packing.py [MODEL DOCUMENTS]"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import seqtile
from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl

LENGTH = 65_536  # tokens of a row; each document in it begins at position 0
name, documents = sys.argv[1:] or ["Qwen/Qwen3-8B", "documents.jsonl"]
dataset = load_dataset("json", data_files=documents, split="train")  # a line of the file: {"text": "..."}
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(
    name,
    dtype=torch.bfloat16,
)
arguments = SFTConfig(
    output_dir="runs/packing",
    max_length=LENGTH,
    packing=True,  # "bfd": fills each row with the documents that fit best, and tells them apart by position_ids
    num_train_epochs=2,
    per_device_train_batch_size=1,
    gradient_checkpointing=True,
    bf16=True,
    learning_rate=2e-4,  # usual for LoRA; for all parameters 1e-5, without peft_config and with dtype=torch.float32
    lr_scheduler_type="cosine",
    warmup_steps=0.05,  # of all steps
    logging_steps=1,
    save_steps=0.1,  # of all steps
    save_total_limit=1,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
apply_seqtile_to_trl()  # the loss
trainer = SFTTrainer(
    model,
    arguments,
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    # All of a layer but attention, in chunks; attention document by document, without a mask of LENGTH x LENGTH.
    callbacks=[SeqtileCallback(layer=True, attention="varlen")],
)
trainer.train()  # after an interruption: trainer.train(resume_from_checkpoint=True)
print(seqtile.status(model))
trainer.save_model("runs/packing/adapter")
merged = trainer.model.merge_and_unload()  # into the base, in bfloat16
merged.save_pretrained("runs/packing/merged")  # loads without PEFT and seqtile
tokenizer.save_pretrained("runs/packing/merged")
