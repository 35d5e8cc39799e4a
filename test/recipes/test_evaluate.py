"""`seqtile evaluate`: text files and a model, in one process and on ranks that share documents."""

import codecs
import json
import logging
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import seqtile
from recipes.cases import evaluated_on_rank
from recipes.tiny_pretrained import save_tiny
from seqtile.cli import FOREIGN, app
from seqtile.evaluation import logger
from support.pool import Pool

TEXT = "".join(chr(40 + i * i % 80) for i in range(3001))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    save_tiny(tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT[:700])
    return [str(tmp_path / name) for name in ("model", "a.txt", "b.txt")]


def evaluated(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["evaluate", "--device", "cpu", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_files_and_their_report(files: list[str], tmp_path: Path) -> None:
    found = evaluated(*files, "--output", str(tmp_path / "out"))
    assert found["tokens"] == 3000 + 699 and found["perplexity"] > 1 and found["bits_per_byte"] > 1
    assert [(span["start"], span["stop"]) for span in found["by_position"]] == [(0, 1024), (1024, 2048), (2048, 3000)]
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == found
    assert (tmp_path / "out" / "evaluation.png").read_bytes()[:4] == b"\x89PNG"
    strided = evaluated(*files, "--context", "1000", "--stride", "300", "--layer")
    assert strided["tokens"] == found["tokens"] and strided["loss"] != found["loss"]
    printed = CliRunner().invoke(app, ["evaluate", "--device", "cpu", *files]).output
    assert f"{'all':>22}{found['tokens']:>12,}{found['loss']:>9.4f}" in printed


def test_the_picture_is_left_out_without_matplotlib(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("seqtile.recipes.output.find_spec", lambda name: None)
    evaluated(*files, "--output", str(tmp_path / "out"))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["evaluation.json"]
    assert "needs matplotlib" in caplog.text


@pytest.mark.parametrize(("before", "after"), [("", ""), ("<s> ", ""), ("<s> ", " </s>")], ids=repr)
def test_the_tokens_of_the_tokenizer(before: str, after: str, files: list[str]) -> None:
    """The tokenizer's tokens, with the special tokens that it adds, of the text as it is: with its ends of lines, but
    without a byte order mark."""
    path = Path(files[0]) / "tokenizer.json"
    own = Tokenizer.from_file(str(path))
    special = [(name, own.token_to_id(name)) for name in ("<s>", "</s>")]
    own.post_processor = TemplateProcessing(single=f"{before}$A{after}", special_tokens=special)
    own.save(str(path))
    Path(files[1]).write_bytes(codecs.BOM_UTF8 + b"a\rline\r\n" * 50)
    texts = [TEXT[:700], "a\rline\r\n" * 50]
    files = [files[0], files[2], files[1]]
    tokenizer = AutoTokenizer.from_pretrained(files[0])
    ids = tokenizer(texts).input_ids
    assert [len(each) - len(text) for each, text in zip(ids, texts, strict=True)] == [bool(before) + bool(after)] * 2
    model = AutoModelForCausalLM.from_pretrained(files[0])
    found = seqtile.evaluate(model, ids, text_bytes=sum(len(text.encode()) for text in texts))
    asked = evaluated(*files)
    assert asked.pop("by_position")[-1]["tokens"] == found.by_position[-1].tokens
    assert asked == pytest.approx({name: value for name, value in found.figures().items() if name in asked}, rel=1e-6)


def test_names_are_printed_and_drawn_as_they_are(files: list[str], tmp_path: Path) -> None:
    """Markup of Rich and TeX that would be wrong; numbers beyond all bounds are as good as none."""
    hard, place = tmp_path / "$\\frac{x$ <b>[red][", tmp_path / "[" / "b] [draft]"
    hard.write_text(TEXT[:300])
    given = (files[0], str(hard), "--output", str(place))
    found = evaluated(*given, "--context", str(10**30))
    assert found["tokens"] == 299 and (place / "evaluation.png").read_bytes()[:4] == b"\x89PNG"
    hard.rename(missing := tmp_path / "[" / "b].txt")
    missing.unlink()
    printed = CliRunner().invoke(app, ["evaluate", files[0], str(missing)]).output
    assert printed.startswith(f"error: {missing} does not exist")


def test_nothing_but_the_result_is_printed(files: list[str]) -> None:
    printed = CliRunner().invoke(app, ["evaluate", "--device", "cpu", *files]).stdout
    assert printed.startswith(f"{'tokens before':>22}") and not printed.endswith("\n\n")


def test_lines_of_other_packages() -> None:
    """Exactly these are silenced, and they still begin as they are known."""
    for name, start in FOREIGN.items():
        package = find_spec(name.split(".")[0].lower())
        files = Path(package.origin).parent.rglob("*.py") if package and "<" not in start else []
        texts = [file.read_text("utf-8", "ignore") for file in files]
        assert not texts or any(start in text for text in texts), f"{package} has no {start}"
        logger = logging.getLogger(name)
        records = [logging.makeLogRecord({"msg": "%s and more", "args": (text,)}) for text in (start, "another line")]
        assert [bool(logger.filter(record)) for record in records] == [False, True]


def test_more_tokens_than_a_model_is_configured_for(files: list[str], caplog: pytest.LogCaptureFixture) -> None:
    logger.warning_once.cache_clear()
    evaluated(*files, "--context", "256")
    assert not caplog.messages
    evaluated(*files, "--context", "100000")
    [said] = caplog.messages
    assert "LlamaForCausalLM is configured for 256 positions at most" in said and "(--context 256)" in said


def test_an_adapter(files: list[str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(files[0])
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    with_it = evaluated(*files, "--adapter", str(tmp_path / "adapter"))
    assert abs(with_it["loss"] - evaluated(*files)["loss"]) > 1e-4


def test_what_cannot_be_evaluated(files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\0\xff")
    save_tiny(tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    save_tiny(tmp_path / "wide")
    config = tmp_path / "wide" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 10**12}))
    for arguments, said in (
        ([files[0], str(tmp_path / "none.txt")], "none.txt does not exist"),
        ([files[0], str(tmp_path / "empty.txt")], "empty.txt has 0 tokens, expected 2 at least"),
        ([files[0], str(tmp_path / "binary.txt")], "cannot be read as UTF-8 text"),
        ([*files, str(tmp_path)], f"{tmp_path} is a directory, expected text files; pass those in it, such as"),
        (["/nowhere", files[1]], "error: MODEL: /nowhere does not exist"),
        ([str(tmp_path), files[1]], f"error: MODEL: {tmp_path} holds no config.json"),
        (["nobody/nothing", files[1]], "MODEL: there is no directory nobody/nothing here; and as a hub name it was"),
        ([str(tmp_path / "damaged"), files[1]], "error: MODEL: the tokenizer of"),
        ([*files, "--dtype", "float8"], "--dtype: expected one of float32, bfloat16, got 'float8'"),
        ([*files, "--adapter", str(tmp_path)], "--adapter: .* cannot be loaded"),
        ([*files, "--adapter", files[1]], f"--adapter: {files[1]} is no directory"),
        ([files[0], str(tmp_path / "pipe")], "pipe is a pipe or a device, expected text files"),
        ([*files, "--output", str(tmp_path / "circle")], f"--output: {tmp_path}/circle is a link to nothing"),
        ([*files, "--output", str(tmp_path / "circle" / "x")], "circle/x cannot be written to (Too many levels of"),
        ([*files, "--output", files[1]], f"--output: {files[1]} cannot be written to (File exists)"),
        ([str(tmp_path / "wide"), files[1]], "need more memory than there is; --context N gives the model at most N"),
        ([*files, "--per-node", "2"], "--per-node is for GPUs that share a document; start under torchrun"),
        ([*files, "--per-node", "0"], "--per-node: expected at least 1, got 0"),
        ([*files, "--stride", "7"], "--stride: expected at least 1 and less than --context, which is not given"),
        ([*files, "--context", "7", "--stride", "7"], "less than --context, which is 7 (pass a longer one, or"),
        ([*files, "--context", "1"], "--context: expected at least 2, a token and the one that follows it, got 1"),
    ):
        result = CliRunner().invoke(app, ["evaluate", "--device", "cpu", *arguments])
        assert result.exit_code == 1
        assert said.split(" .* ")[-1] in " ".join(result.output.split()), result.output


@pytest.mark.dist
@pytest.mark.parametrize("pool", [(2, "own")], indirect=True)
def test_ranks_share_documents(pool: Pool, files: list[str]) -> None:
    alone = evaluated(*files, "--context", "1001")
    code, printed = pool.run(evaluated_on_rank, *files, "--context", "1001", "--json", "--per-node", "1")[0]
    assert code == 0, printed
    assert "2 ranks share a sequence, 1 on each of 2 nodes" in printed
    found = json.loads(printed[printed.index("{") :])
    assert found["tokens"] == alone["tokens"] and found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert [span["tokens"] for span in found["by_position"]] == [span["tokens"] for span in alone["by_position"]]
