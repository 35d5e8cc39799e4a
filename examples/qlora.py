"""Trains LoRA adapters over a 4-bit base on long chats, saves them, and merges them into the base in bfloat16.
Needs one GPU (Qwen3-8B: 24 GB, predicted), `pip install 'trl==1.16.*' peft bitsandbytes`, and chats as JSONL.

python examples/qlora.py [MODEL CHATS]"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

import seqtile
from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl

LENGTH = 32_768  # tokens of a chat, at most
name, chats = sys.argv[1:] or ["Qwen/Qwen3-8B", "chats.jsonl"]
# A line of the file: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
dataset = load_dataset("json", data_files=chats, split="train")  # or load_dataset("a name on the Hub", split="train")
tokenizer = AutoTokenizer.from_pretrained(name)
four_bits = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, quantization_config=four_bits)
lora = LoraConfig(
    r=16,
    lora_alpha=32,
    lora_dropout=0.0,  # with dropout layers are not fused, and every chunk would decode its 4-bit weights again
    target_modules="all-linear",
    task_type="CAUSAL_LM",
)
arguments = SFTConfig(
    output_dir="runs/qlora",
    max_length=LENGTH,
    assistant_only_loss=True,  # trains the answers, not the questions
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
    processing_class=tokenizer,
    peft_config=lora,
    callbacks=[SeqtileCallback(layer=True, head_groups="auto")],  # all of a layer, in chunks
)
trainer.train()
print(seqtile.status(model))
trainer.save_model("runs/qlora/adapter")

base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)  # whole, in host memory: 4 bits round twice
merged = PeftModel.from_pretrained(base, "runs/qlora/adapter").merge_and_unload()
merged.save_pretrained("runs/qlora/merged")
tokenizer.save_pretrained("runs/qlora/merged")
print(AutoModelForCausalLM.from_pretrained("runs/qlora/merged", dtype="auto").dtype)  # loads without PEFT and seqtile
