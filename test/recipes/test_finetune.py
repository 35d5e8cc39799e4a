import json
import shutil
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from assertions import relative_error
from seqtile.cli import app
from seqtile.recipes.documents import read_texts, sequences, standard_library
from seqtile.recipes.train import is_out_of_memory
from tiny import build

TEXT = "a long document, of words and words and words; "


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and a character tokenizer, as save_pretrained writes them."""
    directory = tmp_path_factory.mktemp("pretrained")
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(c): c - 29 for c in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(directory)
    build("llama").save_pretrained(directory)
    return directory


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "document.txt"
    path.parent.mkdir()
    path.write_text(TEXT * 400)
    return path


def test_compare(pretrained: Path, document: Path, tmp_path: Path) -> None:
    """The whole job: sequences of more than a tile, both runs in processes of their own, report, picture and model."""
    output = tmp_path / "new" / "run"
    command = [sys.executable, "-m", "seqtile.cli", "finetune", "--model", str(pretrained), "--data", str(document)]
    command += ["--seq-len", "2500", "--steps", "3", "--compare", "--device", "cpu", "--output", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((output / "report.json").read_text())
    for run in ("baseline", "seqtile"):
        assert len(report[run]["losses"]) == 3 and report[run]["peak_mib"] > 100
        assert report[run]["losses"][0] > report[run]["losses"][2], "it learns"
    assert "seqtile, 2048 tokens a tile, 2 of 2 layers" in report["seqtile"]["status"]
    differences = [abs(a - b) for a, b in zip(report["baseline"]["losses"], report["seqtile"]["losses"], strict=True)]
    assert report["max_loss_difference"] == max(differences) <= 1e-4
    assert "peak memory, MiB" in result.stdout and f"{report['seqtile']['losses'][2]:.6f}" in result.stdout
    assert (output / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((output / "model").glob("*.safetensors"))
    before = AutoModelForCausalLM.from_pretrained(pretrained)
    after = AutoModelForCausalLM.from_pretrained(output / "model")
    assert all(relative_error(b, a) > 0 for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(output / "model")("word")["input_ids"]


def refused(*arguments: object) -> str:
    """What the command line says, on one line, of a job that it refuses."""
    result = CliRunner().invoke(app, ["finetune", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


def test_bad_input(pretrained: Path, document: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    common = ("--model", pretrained, "--output", output, "--seq-len", 50, "--steps", 1)
    assert "does not exist" in refused(*common, "--data", tmp_path / "nowhere")
    assert "--seq-len is 1, expected at least 2" in refused(*common, "--seq-len", 1)
    assert "--steps is 0" in refused(*common, "--steps", 0)
    assert "--dtype is 'int4', expected one of float32, bfloat16" in refused(*common, "--dtype", "int4")
    assert "--device is 'tpu'" in refused(*common, "--device", "tpu")
    assert "--learning-rate" in refused(*common, "--learning-rate", 0)
    assert "--model: /nowhere does not exist" in refused(*common, "--model", "/nowhere")
    assert "holds no config.json" in refused(*common, "--model", tmp_path)
    short = refused(*common, "--data", document, "--seq-len", 1_000_000)
    assert "tokens, expected at least 1000000, one sequence; pass more text, or a shorter --seq-len" in short
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=50)).save_pretrained(tmp_path / "gpt2")
    assert "'gpt2' is not supported; seqtile supports llama" in refused(*common, "--model", tmp_path / "gpt2")
    for name, changes, message in (
        ("gelu", {"hidden_act": "gelu"}, "activation is GELU"),
        ("small", {"vocab_size": 60}, "the tokenizer gave token"),
    ):
        copied = tmp_path / name
        shutil.copytree(pretrained, copied)
        build("llama", **changes).save_pretrained(copied)
        assert message in refused(*common, "--model", copied, "--data", document, "--compare")
    assert not output.exists(), "a refused job leaves nothing behind"
    blocked = refused(*common, "--data", document, "--output", document / "run")
    assert "cannot be written to" in blocked and "choose another directory" in blocked


def test_running_out_of_memory_is_told_from_a_mistake() -> None:
    with pytest.raises(RuntimeError) as allocation:
        torch.empty(2**56)
    with pytest.raises(RuntimeError) as mistake:
        torch.zeros(2) @ torch.zeros(3)
    assert is_out_of_memory(allocation.value) and not is_out_of_memory(mistake.value)
    assert is_out_of_memory(BrokenProcessPool())


def test_documents_are_read_in_order_and_binaries_skipped(pretrained: Path, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.txt").write_bytes(b"zero\x00byte")
    assert list(read_texts((tmp_path,))) == ["first", "second"]
    assert list(read_texts((tmp_path / "b.txt",))) == ["second"]
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    rows = sequences((tmp_path,), tokenizer, seq_len=4, count=5)
    letters = [tokenizer.convert_ids_to_tokens(row) for row in rows.tolist()]
    assert letters[0] == list("firs") and letters[1] == ["t", "</s>", "s", "e"]
    assert rows.shape == (5, 4) and rows[3].equal(rows[0]), "full sequences repeat when the text ends"
    assert rows.dtype == torch.int64


def test_the_default_document_is_long() -> None:
    assert sum(path.stat().st_size for path in standard_library()) > 1_000_000


def test_env_lists_versions() -> None:
    result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == 0 and f"torch         {torch.__version__}" in result.output
