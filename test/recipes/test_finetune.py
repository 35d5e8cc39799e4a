"""`seqtile finetune` in one process: text, chats, adapters, a comparison, what is refused and what is said."""

import json
import os
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from recipes.cases import on_rank
from recipes.tiny_pretrained import save_tiny
from seqtile import memory
from seqtile.attention.nodes import Nodes
from seqtile.cli import app
from seqtile.integrations.trl import _KNOWN, restore_trl
from seqtile.recipes import TRL, check_trl, dataset
from seqtile.recipes.memory import planned_setup
from seqtile.recipes.options import Parser, parsed
from seqtile.recipes.tuner import Tuner
from support.assertions import relative_error

TEXT = "a long document, of words and words and words; "
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pretrained")
    save_tiny(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "document.txt"
    path.parent.mkdir()
    path.write_text(TEXT * 400)
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    rows = [[("user", f"what is {n}"), ("assistant", "a number " * (n + 2))] for n in range(8)]
    lines = [json.dumps({"messages": [{"role": role, "content": said} for role, said in row]}) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_compare(
    pretrained: Path, document: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole job: sequences of more than a chunk, the untiled run in its own process, report, picture and model."""
    monkeypatch.setattr("seqtile.rules.MLP_CHUNK_BYTES", 0)
    output = tmp_path / "new" / "run"
    (options := tmp_path / "options.yaml").write_text("compare: true\n")
    job = ("--model", pretrained, "--data", document, "--seq-len", 2500, "--steps", 3, "--config", options)
    code, ours = on_rank(*job, "--learning-rate", "1e-3", "--output", output)
    printed = capfd.readouterr().out + ours
    assert code == 0, printed
    report = json.loads((output / "report.json").read_text())
    untiled, tiled = report["runs"]["untiled"], report["runs"]["seqtile"]
    for run in (untiled, tiled):
        assert len(run["loss"]) == 3 and min(run["peak_mib"]) > 100
        assert run["loss"][0] > run["loss"][2], "it learns"
    assert "seqtile, 2048 tokens a chunk, 2 of 2 fused" in tiled["status"]
    assert re.search(r"the first training step: .*equal the untiled model's", tiled["status"])
    difference = max(abs(a - b) for a, b in zip(untiled["loss"], tiled["loss"], strict=True))
    assert f"largest loss difference {difference:.1e}; peak memory " in ours and difference <= 1e-4
    for name in ("untiled", "seqtile"):
        for step, end in ((1, r"  \d\d:\d\d left"), (2, r"  \d\d:\d\d left"), (3, "")):
            peak = r"peak [\d,]+ MiB" + r" \([\d,]+ predicted\)" * (name == "seqtile")
            line = rf"{name}: step {step}/3  loss \d\.\d{{4}}  [\d,]+ tokens/s  {peak}{end}"
            assert re.search(f"^{line}$", printed, re.MULTILINE), "a line a step"
    assert (
        ours.startswith("data: 1 file read, ")
        and "\n  mlp   seqtile, 2048 tokens a chunk" in ours
        and "\033" not in printed
    )
    assert not re.search("[\r\b]", printed), "no bars in a log"
    assert "peak memory, MiB" in ours and f"{tiled['loss'][2]:.6f}" in ours
    assert (output / "report.png").read_bytes().startswith(b"\x89PNG")
    before, after = (AutoModelForCausalLM.from_pretrained(place) for place in (pretrained, output / "model"))
    assert all(relative_error(b, a) > 0 for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(output / "model")("word")["input_ids"]


def test_chats_with_adapters(pretrained: Path, chats: Path, tmp_path: Path) -> None:
    """Rows of messages, one pass; adapters without dropout at their own rate, saved as adapters, and merged."""
    output = tmp_path / "run"
    code, said = on_rank("--model", pretrained, "--data", chats, "--use-peft", "--merge", "--output", output)
    assert code == 0 and "data: 8 rows of messages" in said and "step 8/8" in said, said
    config = json.loads((output / "model" / "adapter_config.json").read_text())
    assert config["lora_dropout"] == 0 and config["r"] == 16 and "down_proj" in str(config["target_modules"])
    assert json.loads((output / "report.json").read_text())["options"]["learning_rate"] == 2e-4
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pretrained), output / "model").eval()
    merged = AutoModelForCausalLM.from_pretrained(output / "merged").eval()
    ids = torch.randint(3, 90, (1, 40))
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(output / "model").chat_template == CHAT


def test_an_output_that_held_another_model(pretrained: Path, document: Path, tmp_path: Path) -> None:
    """Of an adapter nothing stays that would make the new model one; names are no patterns and no TeX; few losses."""
    tables, named = tmp_path / "a[1].jsonl", tmp_path / r"$\frac{x$"
    tables.write_text('{"text": "a text"}\n')
    (tmp_path / "a1.jsonl").write_text('{"text": "another"}\n' * 3)
    shutil.copytree(pretrained, named)
    config = json.loads((named / "config.json").read_text())
    (named / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    job = ("--model", named, "--steps", 1, "--output", tmp_path / "run")
    code, said = on_rank(*job, "--data", tables, "--use-peft", "--logging-steps", 5)
    assert code == 0 and "data: 1 row of text" in said and report_of(tmp_path / "run")["step"] == [1], said
    (tmp_path / "run" / "model" / "notes.md").write_text("mine")
    code, said = on_rank(*job, "--data", document, "--seq-len", 50)
    assert code == 0 and (tmp_path / "run" / "report.png").exists(), said
    assert "note: the model is configured for 40 positions at most, and --seq-len is 50" in said
    assert f"note: the model of an earlier run in {tmp_path / 'run'} will be replaced" in said
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")).__name__ == "LlamaForCausalLM"
    assert (tmp_path / "run" / "model" / "notes.md").read_text() == "mine"


@pytest.mark.full("ways to read a table", but=("prompt",))
@pytest.mark.parametrize("kind", ["prompt", "text", "csv", "json"])
def test_tables(kind: str, pretrained: Path, tmp_path: Path) -> None:
    file, rows = tmp_path / f"rows.{'jsonl' if kind in ('prompt', 'text') else kind}", [{"text": TEXT}] * 3
    if kind == "prompt":
        rows = [{"prompt": "what", "completion": " is it " * n} for n in range(2, 5)]
    text = "\n".join(map(json.dumps, rows)) if kind != "csv" else "text\n" + f'"{TEXT}"\n' * 3
    file.write_text(json.dumps(rows) if kind == "json" else text)
    code, said = on_rank("--model", pretrained, "--data", file, "--output", tmp_path / "run")
    assert code == 0 and "step 3/3" in said, said


def test_a_file_of_options(pretrained: Path, document: Path, tmp_path: Path) -> None:
    """In YAML, as TRL takes them; the command line goes before it."""
    file = tmp_path / "options.yaml"
    file.write_text(f"model: {pretrained}\ndata: [{document}]\nseq_len: 60\nmax_steps: 2\nlayer: true\n")
    code, said = on_rank("--config", file, "--steps", "3", "--output", tmp_path / "run")
    assert code == 0 and "step 3/3" in said, said
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["options"]["max_length"] == 60 and "\n  layer " in report_of(tmp_path / "run")["status"]


@pytest.mark.full("two runs", but=("chats",))
@pytest.mark.parametrize("kind", ["chats", "document"])
def test_evaluation_and_accumulation(
    kind: str, pretrained: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A part of the rows is evaluated on; a step has several batches, whose tokens are counted."""
    data = request.getfixturevalue(kind)
    job = ("--model", pretrained, "--data", data, "--seq-len", 2000, "--test-split-size", 0.25, "--eval-strategy")
    job = (*job, "steps", "--eval-steps", 1, "--gradient-accumulation-steps", 3, "--logging-steps", 2)
    code, said = on_rank(*job, "--output", tmp_path / "run")
    assert code == 0 and re.search(r"^seqtile: evaluated after step 2  loss \d\.\d{4}$", said, re.MULTILINE), said
    assert report_of(tmp_path / "run")["step"] == [2] and "step 2/" in said and "step 1/2" not in said


def test_the_hub(pretrained: Path, chats: Path, tmp_path: Path) -> None:
    """What is pushed is the saved model."""
    pushed = []
    with (
        patch.object(Tuner, "init_hf_repo", lambda self, token=None: None),
        patch.object(Tuner, "push_to_hub", lambda self: pushed.append(self.args.output_dir)),
    ):
        job = ("--model", pretrained, "--data", chats, "--steps", 1, "--push-to-hub", "--save-every", 1)
        code, _ = on_rank(*job, "--output", tmp_path / "run")
    assert code == 0 and pushed == [str(tmp_path / "run" / "model")] and (tmp_path / "run" / "checkpoint-1").exists()


def test_rows_that_cannot_be_trained(pretrained: Path, tmp_path: Path) -> None:
    """Prompts longer than a sequence are counted; data in YAML may be one name, which --data replaces."""
    rows, options, bare = tmp_path / "rows.jsonl", tmp_path / "options.yaml", tmp_path / "bare"
    texts = [{"prompt": "what " * 10 * n, "completion": " is it"} for n in (1, 1, 20)]
    rows.write_text("\n".join(map(json.dumps, texts)))
    options.write_text(f"data: {rows}\nmodel: {pretrained}\nseq_len: 200\noutput: {tmp_path / 'run'}\n")
    code, said = on_rank("--config", options)
    assert code == 0 and "note: 1 row left out, with no token to train within --seq-len" in said, said
    assert "step 2/2" in said
    assert "no row has a token to train within --seq-len" in refused("--config", options, "--seq-len", 20)
    assert "--data: nowhere does not exist" in refused("--config", options, "--data", "nowhere")
    save_tiny(bare)
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    assert "has no chat template; pass an instruct model" in refused("--config", options, "--model", bare)
    tokenizer = AutoTokenizer.from_pretrained(bare)
    tokenizer.chat_template = CHAT.replace(
        "{{ m['content'] }}", "{% generation %}{% endgeneration %}{{ m['content'] }}"
    )
    tokenizer.save_pretrained(bare)
    said = refused("--config", options, "--model", bare, "--assistant-only-loss")
    assert "TRL finds a row without an assistant's tokens; expected an assistant's answer in every row" in said
    chat = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows.write_text(json.dumps({"conversations": chat}))
    said = refused("--config", options)
    assert (
        "has the roles human, gpt, which the chat" in said
        and "expected user for human, assistant for gpt: replace" in said
    )
    tokenizer.chat_template = CHAT.replace("}}: ", "}}{{ 'human' if false else 'gpt' }}: ")  # which names both
    tokenizer.save_pretrained(bare)
    code, said = on_rank("--config", options, "--model", bare)
    assert code == 0 and "step 1/1" in said, said


def test_data_that_is_not_named(pretrained: Path, document: Path, tmp_path: Path, monkeypatch) -> None:
    """The default, Python's library, here a document; and data sets that a YAML file lists."""
    monkeypatch.setattr(dataset, "standard_library", lambda: [document])
    common = ("--model", pretrained, "--seq-len", 50, "--steps", 1, "--output")
    code, said = on_rank(*common, tmp_path / "default")
    assert code == 0 and "without --data it trains on Python's standard library\ndata: 1 file read" in said, said
    rows, options = tmp_path / "rows.jsonl", tmp_path / "options.yaml"
    rows.write_text('{"text": "a text"}\n' * 3)
    options.write_text(f"datasets: [{{path: json, data_files: {rows}}}]\n")
    code, said = on_rank("--config", options, *common, tmp_path / "listed")
    assert code == 0 and "data: 3 rows of text" in said, said


@pytest.mark.full("10 s; what is chosen is among the tests of fitting")
def test_fit(pretrained: Path, tmp_path: Path) -> None:
    """The cheapest features with which a step fits, in four fifths of a machine's memory on a CPU."""
    config = AutoConfig.from_pretrained(pretrained)
    for tiles, layer in ((("loss", "mlp"), False), (memory.TILES, True)):
        size = memory.plan(config, seq_len=4096, dtype="float32", tiles=tiles).gpu_bytes
        job = ("--model", pretrained, "--steps", 1, "--fit", "--output", tmp_path / str(layer))
        with patch("seqtile.fitting.available", lambda size=size: size / 0.8 + 2**20):
            code, said = on_rank(*job)
        assert code == 0 and f" of {size / 2**30:.1f} GiB, fits" in said, said
        assert ("\n  layer " in report_of(tmp_path / str(layer))["status"]) == layer


def test_the_attention_and_the_rows_that_are_planned(pretrained: Path) -> None:
    """TRL packs rows into one, or pads short ones; the attention is the model's."""
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    state = SimpleNamespace(deepspeed_plugin=None)
    full, short = [[1] * 20] * 3, [[1] * 20, [1] * 19]
    two = ("--per-device-train-batch-size", "2")
    for options, lengths, attention, expected in (
        ((), short, "sdpa", "plain"),
        (two, full, "eager", "plain"),
        (two, short, "sdpa", "padded"),
        ((*two, "--padding-free", "True"), short, "flash_attention_2", "packed"),
    ):
        asked = parsed(["--model", str(pretrained), "--device", "cpu", "--seq-len", "20", *options])
        model.config._attn_implementation = attention
        rows = {"padding_free": asked.training.padding_free, "train_dataset": Dataset.from_dict({"input_ids": lengths})}
        others = {"accelerator": SimpleNamespace(state=state), "is_fsdp_enabled": False}
        setup = planned_setup(asked, SimpleNamespace(model=model, **rows, **others), {})
        assert (setup.attention, setup.rows, setup.gpus_per_node) == (attention.partition("_")[0], expected, 8)
    over = {"sequence_parallel": SimpleNamespace(nodes=Nodes(8, 4))}  # as `sp.initialize` found them
    assert planned_setup(asked, SimpleNamespace(model=model, **rows, **others, **over), {}).gpus_per_node == 4


def report_of(output: Path) -> dict:
    return json.loads((output / "report.json").read_text())["runs"]["seqtile"]


def refused(*arguments: object) -> str:
    """Returns the one-line error of a job that is refused."""
    code, said = on_rank(*arguments)
    assert code == 1 and "Traceback" not in said, said
    return " ".join(said.split())


def test_bad_input(pretrained: Path, document: Path, tmp_path: Path) -> None:
    output, damaged, binary, odd = (tmp_path / name for name in ("run", "damaged", "binary.dat", "odd.jsonl"))
    common = ("--model", pretrained, "--output", output, "--seq-len", 50, "--steps", 1)
    binary.write_bytes(b"\xff\xfe")
    fifo, rows, broken = tmp_path / "pipe", tmp_path / "rows.jsonl", tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"text": null}\n')
    os.mkfifo(fifo)
    rows.write_text('{"text": "a"}\n')
    odd.write_text('{"question": "a"}\n')
    shutil.copytree(pretrained, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    alone = "--sequence-parallel is 4, but this is one process; start one on each GPU: torchrun --nproc-per-node 4"
    short = "tokens, expected at least 1000000, one sequence; pass more text, or a shorter --seq-len"
    for arguments, message in (
        (("--data", tmp_path / "nowhere"), "nowhere does not exist"),
        (("--data", odd), "has the columns question, expected messages, prompt with completion, or text"),
        (("--data", odd, document), "expected files of one kind"),
        (("--seq-len", 1), "--seq-len: expected at least 2, a token and the one that follows it, got 1"),
        (("--sequence-parallel", 4), alone),
        (("--offload",), "--offload moves what checkpointing keeps off a GPU"),
        (("--head-groups", "auto"), "--head-groups is for whole layers"),
        (("--layer", "--head-groups", "²"), "--head-groups: expected a number or auto, got '²'"),
        (("--fit", "--layer"), "--fit chooses --layer, --head-groups and --offload"),
        (("--num-train-epochs", 0), "--num-train-epochs: expected more than 0, got 0.0"),
        (("--per-device-train-batch-size", -1), "--per-device-train-batch-size: expected at least 1, got -1"),
        (("--gradient-accumulation-steps", 0), "--gradient-accumulation-steps: expected at least 1, got 0"),
        (("--save-every", -1), "--save-every: expected at least 1, or none, got -1"),
        (("--data", broken), "--data: TRL cannot take these rows ('NoneType' object has no attribute"),
        (("--test-split-size", 0.5), "--test-split-size sets rows aside to evaluate on; pass --eval-strategy"),
        (("--merge",), "--merge merges an adapter, but there is none; pass --use-peft too"),
        (("--load-in-4bit",), "--load-in-4bit: what has few bits is not trained; pass --use-peft too"),
        (("--compare", "--resume"), "--compare does two whole runs"),
        (("--steps", 10**30), "--steps: expected at least 1 and less than 2**31, or none"),
        (("--seed", 10**30), "--seed: expected at least 0 and less than 2**32"),
        (("--margin", 1), "--margin: expected a share, at least 0 and less than 1"),
        (("--device", "tpu"), "--device: expected cpu or cuda"),
        (("--data", fifo), "is a pipe or a device, expected files"),
        (("--eval-strategy", "steps", "--data", rows), "there is no split test, only train; pass --test-split-size"),
        (("--stepz", 3), "there is no option --stepz, did you mean --steps?"),
        (("--lora-rank", 8), "there is no option --lora-rank, did you mean --lora-r?"),
        (("--lr", 1e-4), "there is no option --lr, did you mean --learning-rate?"),
        (("--xyz", 3), "there is no option --xyz; seqtile finetune --help"),
        (("--seq", 3), "there is no option --seq"),
        (("--steps", "many"), "argument --max_steps/--max-steps/--steps: invalid int value: 'many'"),
        (("--learning-rate", 1e4), "--learning-rate: expected more than 0 and at most 1"),
        (("--model", "/nowhere"), "--model: /nowhere does not exist"),
        (("--resume",), "--resume: expected a checkpoint in"),
        (("--data", document, "--seq-len", 1_000_000), short),
        (("--data", binary), f"--data holds no UTF-8 text: 1 file skipped, {binary} (not UTF-8 text) first"),
        (("--data", document, "--model", damaged), "the weights of"),
        (("--data", document, "--output", document / "run"), "cannot be written to"),
    ):
        said = refused(*common, *arguments)
        assert message in said, said
    assert not [file for file in output.rglob("*") if file.name != ".lock"], "a refused job leaves nothing behind"


def test_help() -> None:
    """Says at once what matters; every option in it exists, is named once, and has the default that is said."""
    result = CliRunner().invoke(app, ["finetune", "--help"])
    named = re.findall(r"^  (--[\w-]+) ", result.output, re.MULTILINE)
    actions = {option: action for action in Parser()._actions for option in action.option_strings}
    assert result.exit_code == 0 and set(named) <= {*actions, "--config"} and 20 <= len(named) == len(set(named))
    for option, said in re.findall(r"^  (--[\w-]+) [^(\n]*\((\d[\d.]*|runs/finetune)\)", result.output, re.MULTILINE):
        assert str(actions[option].default) == said, option


def yaml_of(directory: Path, text: str) -> Path:
    file = directory / f"{len(list(directory.iterdir()))}.yaml"
    file.write_text(text)
    return file


def test_a_file_of_options_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [b")
    (tmp_path / "unknown.yaml").write_text("modle: tiny")
    for arguments, message in (
        (("--config", tmp_path / "bad.yaml"), "--config: expected a file of options in YAML"),
        ((f"--config={tmp_path / 'unknown.yaml'}",), "there is no option --modle"),
        (("--config",), "--config: expected a file of options in YAML"),
        (("--config", yaml_of(tmp_path, "learning_rate: [1]")), "expected one value for learning_rate, got [1]"),
        (("--config", yaml_of(tmp_path, "model: {}")), "expected one value for model_name_or_path, got {}"),
        (("--config", yaml_of(tmp_path, "steps: 1.5")), "invalid int value: '1.5'"),
        (("--config", yaml_of(tmp_path, "layer: true\nhead_groups: ²")), "--head-groups: expected a number or auto"),
        (("--config", tmp_path / "none.yaml"), "--config: expected a file of options in YAML ([Errno 2] No such file"),
    ):
        assert message in refused(*arguments)


def test_defaults() -> None:
    """In bfloat16: float32 weights under autocast, or a bfloat16 base of adapters, which have a rate of their own."""
    common = ["--device", "cpu", "--bf16", "True", "--output", "unused"]
    more = ([], ["--use_peft"], ["--learning_rate=0.1"], ["--use-peft", "--learning-rate", "1e-5"])
    expected = ((1e-5, "float32"), (2e-4, "bfloat16"), (0.1, "float32"), (1e-5, "bfloat16"))
    for arguments, (rate, dtype) in zip(more, expected, strict=True):
        found = parsed([*common, *arguments])
        assert (found.training.learning_rate, found.model.dtype, found.training.bf16) == (rate, dtype, True)
        assert found.training.gradient_checkpointing and not found.training.packing
        assert found.training.lr_scheduler_type == "cosine" and found.model.lora_dropout == 0


def test_another_trl(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for those that were not tested, and for none at all."""
    job = ("--model", pretrained, "--output", tmp_path / "run")
    for found in ("0.29.1", "1.13.0", "1.15.0", "1.17.0", "2.0.0"):
        monkeypatch.setattr("seqtile.cli.version", lambda name, found=found: found)
        line = f"error: trl {found} is installed, but seqtile finetune needs trl{TRL}; pip install 'seqtile[finetune]'"
        assert refused(*job).startswith(line)
    monkeypatch.setattr("seqtile.cli.version", lambda name: version(f"no-{name}"))
    said = refused(*job)
    assert "no-trl" in said and said.endswith(": pip install 'seqtile[finetune]'")
    for found in ("1.14.0", "1.14.2", "1.16.0", "1.16.9"):
        check_trl(found)


def test_trls_own_loss(pretrained: Path, chats: Path, tmp_path: Path) -> None:
    """Under a TRL whose functions seqtile does not know, with a note, to the same losses."""
    job = ("--model", pretrained, "--data", chats, "--use-peft", "--steps", 3, "--learning-rate", "1e-2")
    on_rank(*job, "--output", tmp_path / "known")
    restore_trl()
    with patch.dict(_KNOWN, {"SFTTrainer.compute_loss": "another"}):
        code, said = on_rank(*job, "--output", tmp_path / "unknown")
    assert code == 0 and "note: the loss is TRL's own, in chunks; seqtile's needs TRL 1.16" in said, said
    assert report_of(tmp_path / "unknown")["loss"] == pytest.approx(report_of(tmp_path / "known")["loss"], rel=1e-4)


def test_bitsandbytes_is_named(pretrained: Path, tmp_path: Path) -> None:
    with patch("seqtile.recipes.options.find_spec", lambda name: None):
        said = refused("--model", pretrained, "--use-peft", "--load-in-4bit", "--output", tmp_path / "run")
    assert said == "error: --load-in-4bit needs bitsandbytes: pip install bitsandbytes"
