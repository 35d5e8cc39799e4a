"""Trains LoRA adapters of an image model's language part on chats with images, saves them, and merges them.
Needs one GPU of 80 GB, `pip install 'trl==1.16.*' peft torchvision`, and chats with the paths of images as JSONL.

python examples/images.py [MODEL CHATS]"""

import sys

import torch
from datasets import Image, List, load_dataset
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import SFTConfig, SFTTrainer

import seqtile
from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl

name, chats = sys.argv[1:] or ["Qwen/Qwen3-VL-8B-Instruct", "chats.jsonl"]
# A line: {"images": ["page1.png"], "prompt": [{"role": "user", "content": "..."}], "completion": [{"role": ...}]}
dataset = load_dataset("json", data_files=chats, split="train")
dataset = dataset.cast_column("images", List(Image()))  # opened when their row is used
processor = AutoProcessor.from_pretrained(name)
model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.bfloat16)
lora = LoraConfig(
    r=16,
    lora_alpha=32,
    lora_dropout=0.0,
    target_modules=r".*language_model.*_proj",  # not the vision tower
    task_type="CAUSAL_LM",
)
arguments = SFTConfig(
    output_dir="runs/images",
    max_length=None,  # a row that is cut could lose a part of an image
    num_train_epochs=2,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    gradient_checkpointing=True,
    learning_rate=2e-4,  # usual for LoRA
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
    processing_class=processor,
    peft_config=lora,
    callbacks=[SeqtileCallback(layer=True)],  # all of the language model's layers but attention, in chunks
)
trainer.train()
print(seqtile.status(model))
trainer.save_model("runs/images/adapter")
merged = trainer.model.merge_and_unload()  # into the base, in bfloat16
merged.save_pretrained("runs/images/merged")
processor.save_pretrained("runs/images/merged")
