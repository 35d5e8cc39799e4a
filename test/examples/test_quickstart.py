"""The commands of docs/quickstart.md that fine-tune, on a tiny model and short data, and what they leave behind."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from book.page import ROOT, blocks_of
from recipes.cases import Killed, ended_in, kill, on_rank
from recipes.tiny_pretrained import save_tiny
from support.pool import Pool
from support.tiny import build

pytest.importorskip("trl")
SECTION = (ROOT / "docs" / "quickstart.md").read_text().partition("## From the command line\n")[2]
COMMANDS = [
    shlex.split(line)
    for block in blocks_of(SECTION)
    for line in block.text.replace("\\\n", " ").splitlines()
    if "finetune" in line
]
TINY = {"--model": "tiny", "--seq-len": "60", "--save-every": "1", "--sequence-parallel": "2"}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ '<' + m['content'] + '>' }}{% endif %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the commands name, in the directory in which they run; layers are such that 4 bits divide them."""
    save_tiny(tmp_path / "tiny")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    build("llama", **sizes).save_pretrained(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tiny")
    (tmp_path / "book.txt").write_text("a book, of words and words and words; " * 8)
    rows = [[("user", "what is it"), ("assistant", "a number " * n)] for n in range(2, 8)]
    lines = [json.dumps({"messages": [{"role": role, "content": said} for role, said in row]}) for row in rows]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)


def options_of(*marks: str, without: str = "--resume") -> list[str]:
    """Returns the options of the page's one command that has all these words, with small values."""
    [command] = [words for words in COMMANDS if set(marks) <= set(words) and without not in words]
    options = command[command.index("finetune") + 1 :]
    return [TINY.get(before, word) for before, word in zip(["", *options], options, strict=False)]


def losses(said: str) -> list[str]:
    return re.findall(r"seqtile: step \d+/\d+  loss (\d\.\d+)", said)


def same_weights(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(ours.equal(theirs) for ours, theirs in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("output", ["runs/chat", "runs/chat4bit"])
def test_chats(output: str) -> None:
    code, said = on_rank(*options_of(output), "--learning-rate", "0.01")
    assert code == 0 and len(losses(said)) == 6, said
    base = AutoModelForCausalLM.from_pretrained("tiny")
    adapted = AutoModelForCausalLM.from_pretrained(f"{output}/model")  # with its base, by PEFT
    ids = torch.tensor([AutoTokenizer.from_pretrained(f"{output}/model")("a number ").input_ids])
    assert not torch.allclose(adapted(ids).logits, base(ids).logits, atol=1e-3)
    assert AutoTokenizer.from_pretrained(f"{output}/model").chat_template == TEMPLATE


@pytest.mark.full("4 s; test/recipes/test_resume.py ends runs, too")
def test_a_book_and_after_a_kill() -> None:
    book, resumed = options_of("runs/book"), options_of("runs/book", "--resume", without="")
    assert resumed == [*book, "--resume"]
    code, said = on_rank(*book, "--output", "runs/whole")
    expected = losses(said)
    assert code == 0 and len(expected) == 5, said
    with pytest.raises(Killed), ended_in(4, kill):
        on_rank(*book)
    assert not Path("runs/book/model").exists() and Path("runs/book/checkpoint-3").is_dir()
    code, said = on_rank(*resumed)
    assert code == 0 and "goes on after step 3" in said and losses(said) == expected[3:], said
    start, ended, whole = (
        AutoModelForCausalLM.from_pretrained(name) for name in ("tiny", "runs/book/model", "runs/whole/model")
    )
    assert same_weights(ended, whole) and not same_weights(ended, start)


def test_a_file_of_options() -> None:
    """Of an example, which the command line goes before."""
    code, said = on_rank(*options_of("--config"), "--model", "tiny", "--seq-len", "100", "--save-every", "1")
    assert code == 0 and len(losses(said)) == 4, said
    report = Path("runs/finetune_qlora/report.json").read_text()
    assert "2 of 2 fused, attention in 2 head chunks" in report, report
    AutoModelForCausalLM.from_pretrained("runs/finetune_qlora/merged")
    config = json.loads(Path("runs/finetune_qlora/model/adapter_config.json").read_text())
    assert any(name.endswith("down_proj") for name in config["target_modules"])


@pytest.mark.full("two processes; test/recipes has them every day")
@pytest.mark.dist
@pytest.mark.parametrize("pool", [(2, "own")], indirect=True, ids=["2"])
def test_ranks(pool: Pool) -> None:
    options = options_of("torchrun")
    found = pool.run(on_rank, *map(absolute, options))
    assert [code for code, _ in found] == [0, 0] and len(losses(found[0][1])) == 6, found


@pytest.mark.full("two minutes: two processes under Accelerate, twice")
@pytest.mark.dist
@pytest.mark.parametrize("config", ["fsdp2", "zero3"])
def test_accelerate(config: str) -> None:
    """As Accelerate has it on CPUs, where it has no FSDP."""
    file = f"examples/accelerate/{config}.yaml"
    command = ["-m", "accelerate.commands.launch", "--config_file", file, "--num_processes", "2", "-m", "seqtile.cli"]
    options = [*options_of("accelerate"), "--device", "cpu", "--bf16", "True"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, *command, "finetune", *options]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and len(losses(ran.stdout)) == 5, ran.stdout[-2000:] + ran.stderr[-2000:]
    saved = AutoModelForCausalLM.from_pretrained("runs/sharded/model")
    assert not same_weights(saved, AutoModelForCausalLM.from_pretrained("tiny"))


def absolute(word: str) -> str:
    """Returns a path as a process in another directory takes it."""
    return str(Path(word).resolve()) if "/" in word or Path(word).exists() else word
