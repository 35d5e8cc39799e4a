"""Splits a page into fenced blocks, and runs its Python blocks once in an empty directory with tiny models."""

import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.tiny_pretrained import save_tiny
from support.tiny import CLASSES, VOCAB, build

ROOT = Path(__file__).parents[2]
HIDDEN, NEEDS = "<!-- test", re.compile(r"<!-- needs (a GPU|several processes|LLaMA-Factory|ms-swift) -->")


@dataclass
class Block:
    """A fenced block, or a hidden one: a comment that starts with `<!-- test`."""

    line: int
    language: str
    text: str = ""
    needs: str | None = None
    """What it needs that is missing here; None if nothing is."""


def blocks_of(text: str) -> list[Block]:
    """Returns the blocks of a page in order."""
    blocks: list[Block] = []
    block, end, needs = None, "", None
    for number, line in enumerate(text.splitlines(), start=1):
        if block is not None:
            if line.strip() == end:
                block = None
            else:
                block.text += line + "\n"
        elif line == HIDDEN or (fence := re.match(r"(`{3,})([\w{}-]*)", line)):
            block = Block(number, "python", needs=needs) if line == HIDDEN else Block(number, fence[2], needs=needs)
            end = "-->" if line == HIDDEN else fence[1]
            blocks.append(block)
        needs = found[1] if (found := NEEDS.fullmatch(line)) else needs if not line.strip() else None
    assert block is None, f"a block that begins in line {blocks[-1].line} does not end"
    return blocks


def architecture_of(name: str) -> str:
    """Returns the supported model type in a Hub name; llama if there is none."""
    plain = name.lower().replace("-", "").replace(".", "")
    known = [arch for arch in CLASSES if arch.removesuffix("_text").replace("_", "") in plain]
    return max(known, key=len, default="llama")


def tiny(name: str = "llama", **changes: Any) -> torch.nn.Module:
    """Returns a tiny model of this model type, or of the type in a Hub name."""
    return build(architecture_of(name), **changes)


def batch(model: torch.nn.Module, tokens: int = 64) -> dict[str, torch.Tensor]:
    """Returns input_ids and labels [1, tokens]."""
    ids = torch.randint(3, min(VOCAB, model.config.vocab_size), (1, tokens))
    return {"input_ids": ids, "labels": ids}


def tokenizer(*_: Any, **__: Any) -> PreTrainedTokenizerBase:
    """Returns the character tokenizer of the tiny models."""
    with TemporaryDirectory() as directory:
        save_tiny(Path(directory))
        return PreTrainedTokenizerFast.from_pretrained(directory)


def run_python(page: Path) -> str | None:
    """Runs a page's Python blocks in order in one namespace. Returns the error, None if there was none.

    Changes the process's own state: call it in a process that ends afterwards.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_pretrained = lambda name, *_, **__: tiny(name)
    transformers.AutoTokenizer.from_pretrained = tokenizer
    names = {"__name__": "page", "torch": torch, "tiny": tiny, "batch": batch}
    with TemporaryDirectory() as directory:
        os.chdir(directory)
        for block in blocks_of(page.read_text()):
            if block.language != "python":
                continue
            try:
                code = compile("\n" * block.line + block.text, str(page), "exec")
                if block.needs is None:
                    exec(code, names)
            except BaseException:
                return f"{page.name}, the block in line {block.line}:\n{traceback.format_exc()}"
        os.chdir(ROOT)
    return None
