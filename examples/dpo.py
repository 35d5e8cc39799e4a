"""Trains LoRA adapters by DPO on pairs of answers to long documents; each document is computed once for both answers.
Needs one GPU (Qwen3-8B at 32K tokens: 80 GB, predicted), `pip install 'trl==1.16.*' peft`, and preferences as JSONL.

python examples/dpo.py [MODEL PREFERENCES]"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import seqtile
from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl

LENGTH = 32_768  # tokens of a document with one answer, at most
name, preferences = sys.argv[1:] or ["Qwen/Qwen3-8B", "preferences.jsonl"]
# A line: {"prompt": [{"role": "user", "content": "..."}], "chosen": [{"role": "assistant", ...}], "rejected": [...]}
dataset = load_dataset("json", data_files=preferences, split="train")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
arguments = DPOConfig(
    output_dir="runs/dpo",
    max_length=LENGTH,
    beta=0.1,
    num_train_epochs=1,
    per_device_train_batch_size=1,  # one pair
    gradient_accumulation_steps=8,
    gradient_checkpointing=True,
    learning_rate=1e-5,  # ten times TRL's default, which is for all parameters
    warmup_steps=0.1,  # of all steps
    logging_steps=1,
    save_steps=0.1,  # of all steps
    save_total_limit=1,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
apply_seqtile_to_trl()  # the log-probabilities
trainer = DPOTrainer(
    model,  # without its adapters it is the reference model, too
    args=arguments,
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    callbacks=[SeqtileCallback(layer=True, share_prefixes=True)],
)
trainer.train()
print(seqtile.status(model))  # how many tokens of the last batch were computed once for both answers
trainer.save_model("runs/dpo/adapter")
merged = trainer.model.merge_and_unload()  # into the base, in bfloat16
merged.save_pretrained("runs/dpo/merged")
tokenizer.save_pretrained("runs/dpo/merged")
