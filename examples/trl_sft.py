"""Fine-tunes with TRL's SFTTrainer: its loss by seqtile's function, and the MLPs in chunks.

python examples/trl_sft.py [MODEL]"""

import inspect
import pathlib
import sys
import tarfile
import typing

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import seqtile
from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl

LENGTH = 4096  # tokens of a sequence
[name] = sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M"]
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
apply_seqtile_to_trl()
modules = (inspect, pathlib, tarfile, typing)  # their sources are long documents that are at hand
arguments = SFTConfig(
    output_dir="runs/trl_sft",
    max_length=LENGTH,
    num_train_epochs=2,
    per_device_train_batch_size=1,
    learning_rate=1e-4,
    use_cpu=not torch.cuda.is_available(),
    logging_steps=1,
    report_to="none",
)
documents = Dataset.from_list([{"text": inspect.getsource(module)} for module in modules])
options = {"processing_class": tokenizer, "callbacks": [SeqtileCallback()]}
trainer = SFTTrainer(model, arguments, train_dataset=documents, **options)
trainer.train()
print(seqtile.status(model))
