"""Trains LoRA adapters by GRPO on questions about long documents; a prompt is computed once for all its completions.
Needs one GPU (Qwen3-8B at 32K tokens: 80 GB, predicted), `pip install 'trl==1.16.*' peft`, and questions as JSONL.

python examples/grpo_shared_prompt.py [MODEL QUESTIONS]"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import seqtile
from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl


def reward(completions: list, answer: list[str], **_: object) -> list[float]:
    """One for each completion that contains the answer; `answer` is the column of the file."""
    return [float(right in completion[0]["content"]) for completion, right in zip(completions, answer, strict=True)]


ANSWERS = 8  # completions of a prompt
LENGTH = 2048  # tokens of a completion, at most
name, questions = sys.argv[1:] or ["Qwen/Qwen3-8B", "questions.jsonl"]
# A line: {"prompt": [{"role": "user", "content": "a document and a question"}], "answer": "..."}
dataset = load_dataset("json", data_files=questions, split="train")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
arguments = GRPOConfig(
    output_dir="runs/grpo",
    num_generations=ANSWERS,
    per_device_train_batch_size=ANSWERS,  # all completions of a prompt in one micro-batch, so that they share it
    gradient_accumulation_steps=4,  # questions of a step; those after the last full step are left out
    max_completion_length=LENGTH,
    num_train_epochs=1,
    gradient_checkpointing=True,
    learning_rate=1e-5,  # ten times TRL's default, which is for all parameters
    logging_steps=1,
    save_steps=0.1,  # of all steps
    save_total_limit=1,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
apply_seqtile_to_trl()  # the log-probabilities
trainer = GRPOTrainer(
    model,
    reward,
    args=arguments,
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    callbacks=[SeqtileCallback(layer=True, share_prefixes=True)],
)
trainer.train()
print(seqtile.status(model))  # how many tokens of the last batch were computed once for all completions
trainer.save_model("runs/grpo/adapter")
merged = trainer.model.merge_and_unload()  # into the base, in bfloat16
merged.save_pretrained("runs/grpo/merged")
tokenizer.save_pretrained("runs/grpo/merged")
