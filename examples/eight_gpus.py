"""Trains all parameters on documents that eight GPUs share, with FSDP2 or ZeRO-3 as Accelerate's config says.
Needs eight GPUs (8B parameters: 80 GB each, predicted), `pip install accelerate datasets`, and documents as JSONL.

accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/eight_gpus.py [MODEL DOCUMENTS]"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

import seqtile
from seqtile import sp
from seqtile.integrations.trainer import SeqtileCallback


class SequenceParallelTrainer(sp.SequenceParallelTrainerMixin, Trainer):
    """Gives every GPU the same documents; one of TRL's trainers takes the mixin, too."""


LENGTH = 1_000_000  # tokens of a document, at most; this model was trained on 1,048,576 positions
name, documents = sys.argv[1:] or ["gradientai/Llama-3-8B-Instruct-Gradient-1048k", "documents.jsonl"]
arguments = TrainingArguments(  # before sp.initialize and the model: it starts torch.distributed, and reads the config
    output_dir="runs/eight_gpus",
    num_train_epochs=1,
    per_device_train_batch_size=1,  # one document for all eight
    gradient_checkpointing=True,
    bf16=True,
    learning_rate=1e-5,  # usual for all parameters
    lr_scheduler_type="cosine",
    warmup_steps=0.05,  # of all steps
    logging_steps=1,
    save_steps=0.2,  # of all steps
    save_total_limit=1,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
ctx = sp.initialize(arguments.world_size)
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


def tokens(row: dict) -> dict:
    ids = tokenizer(row["text"], truncation=True, max_length=LENGTH).input_ids
    return {"input_ids": ids, "labels": ids}


rows = load_dataset("json", data_files=documents, split="train")  # a line of the file: {"text": "..."}
rows = rows.map(tokens, remove_columns=rows.column_names)
trainer = SequenceParallelTrainer(
    model,
    arguments,
    train_dataset=rows,
    processing_class=tokenizer,  # is saved with the model
    data_collator=default_data_collator,  # one document a batch: nothing is padded
    callbacks=[SeqtileCallback(layer=True, offload=True)],  # layer inputs wait in host memory
    sequence_parallel=ctx,
)
trainer.train()
if ctx.rank == 0:
    print(seqtile.status(model))
trainer.save_model("runs/eight_gpus/model")  # gathers the weights; every rank calls it
torch.distributed.destroy_process_group()
