"""Trains LoRA adapters of gpt-oss on long chats, saves them, and merges them into the base in bfloat16.
Needs one GPU of 80 GB (39 GiB for the weights), `pip install 'trl==1.16.*' peft`, and chats as JSONL.

python examples/gpt_oss.py [MODEL CHATS]"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
from trl import SFTConfig, SFTTrainer

import seqtile
from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl

LENGTH = 32_768  # tokens of a chat, at most
name, chats = sys.argv[1:] or ["openai/gpt-oss-20b", "chats.jsonl"]
# A line of the file: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
dataset = load_dataset("json", data_files=chats, split="train")
tokenizer = AutoTokenizer.from_pretrained(name)
decoded = Mxfp4Config(dequantize=True)  # transformers does not train MXFP4 weights
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, quantization_config=decoded)
lora = LoraConfig(
    r=16,
    lora_alpha=32,
    lora_dropout=0.0,
    target_modules="all-linear",  # attention; the experts are parameters, which target_parameters would name
    task_type="CAUSAL_LM",
)
arguments = SFTConfig(
    output_dir="runs/gpt_oss",
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
    callbacks=[SeqtileCallback(layer=True, attention="varlen")],  # attention with its sinks, without LENGTH x LENGTH
)
trainer.train()
print(seqtile.status(model))
trainer.save_model("runs/gpt_oss/adapter")
merged = trainer.model.merge_and_unload()  # into the base, in bfloat16
merged.save_pretrained("runs/gpt_oss/merged")
tokenizer.save_pretrained("runs/gpt_oss/merged")
