"""Tiny models in TRL's trainers: a tokenizer, documents, and trainers that end after three steps of SGD."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from support.tiny import VOCAB
from support.trainers import OPTIONS

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

LENGTHS = (61, 130, 19, 23, 101, 77, 44, 95)  # two of them a batch: some batches fit in a chunk
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' </s>' }}{% endgeneration %}"
    "{% else %}{{ '<s> ' + message['content'] + ' ' }}{% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCAB))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokens.chat_template = TEMPLATE
    return tokens


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in torch.randint(3, VOCAB, (count,)).tolist())


def token_documents() -> Any:
    """Returns documents of random tokens, each a prompt and its completion."""
    masks = [[0] * (length // 3) + [1] * (length - length // 3) for length in LENGTHS]
    rows = [{"input_ids": torch.randint(3, VOCAB, (len(m),)).tolist(), "completion_mask": m} for m in masks]
    return datasets.Dataset.from_list(rows)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) / VOCAB / 8 for ids in completion_ids]


def trainer(
    cls: type,
    model: nn.Module,
    documents: Any,
    output: Path,
    peft_config: Any = None,
    given: dict[str, Any] | None = None,
    **changes: object,
):
    options = OPTIONS | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    options |= {"bf16": False, "train_sampling_strategy": "sequential"}
    name = next(base.__name__ for base in cls.__mro__ if base.__module__.startswith("trl."))
    config = getattr(trl, name.replace("Trainer", "Config"))
    rewards = {"reward_funcs": reward} if name in ("GRPOTrainer", "RLOOTrainer") else {}
    return cls(
        model=model,
        args=config(output_dir=str(output), **options | changes),
        train_dataset=documents,
        eval_dataset=documents,
        processing_class=tokenizer(),
        peft_config=peft_config,
        **rewards,
        **(given or {}),
    )
