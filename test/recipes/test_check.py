"""`seqtile check`: tests on a small model which parts of a model can be tiled."""

import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from seqtile.cli import app
from seqtile.models.forward import layer
from seqtile.models.model_types import model_types
from seqtile.ops.decoder_layer import decoder_layer
from seqtile.proof import sweep
from seqtile.proof.small import small_config
from seqtile.recipes import CheckOptions
from seqtile.recipes.check import EQUAL, print_report
from seqtile.recipes.check import check as run


def check(*arguments: object, variants: str = "--no-variants") -> Result:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models are slower on many threads
    try:
        return CliRunner().invoke(app, ["check", variants, *map(str, arguments)])
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that do not measure memory."""
    monkeypatch.setattr("seqtile.recipes.check.TOKENS", (96,))


def report_of(*arguments: object) -> dict:
    result = check(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def lines(*arguments: object) -> dict[str, dict]:
    return {line["part"]: line for line in report_of(*arguments)["lines"]}


def test_a_config_file(tmp_path: Path) -> None:
    """With an MLP that has other names, and two kinds of layers, one of which is a convolution."""
    kinds = ["conv", "full_attention"] * 4
    CONFIG_MAPPING["lfm2"](num_hidden_layers=8, layer_types=kinds).save_pretrained(tmp_path)
    found = lines(tmp_path / "config.json")
    assert {part: line["how"] for part, line in found.items()} == {"loss": "fused", "mlp": "fused", "layer": "chunked"}
    assert found["layer"]["count"] == 1 and not found["layer"]["head_groups"]
    for line in found.values():
        assert line["error"] < 2 * line["untiled_error"] + 1e-5 and line["peak"] < 1.05 and line["flops"] < 1.5


def test_a_type() -> None:
    """A layer of Llama's shape is fused; its memory is shown."""
    report = report_of("cwm")
    assert report["verdict"] == f"All parts can be tiled:{EQUAL}."
    layer = next(line for line in report["lines"] if line["part"] == "layer")
    assert {line["how"] for line in report["lines"]} == {"fused"} and report["tokens"] == 2048
    assert layer["head_groups"] and layer["peak"] < 0.8 and layer["flops"] < 1.2
    assert 0.99 < layer["flops_checkpointed"] < layer["flops"]


@pytest.mark.usefixtures("few_tokens")
def test_dense_layers_before_experts(tmp_path: Path) -> None:
    """Both kinds of layers remain if the first two have no experts."""
    kinds = {"num_hidden_layers": 6, "num_dense_layers": 2, "layer_types": ["conv", "full_attention"] * 3}
    CONFIG_MAPPING["lfm2_moe"](**kinds).save_pretrained(tmp_path)
    found = lines(tmp_path)
    assert found["mlp"]["count"] == found["experts"]["count"] == 2  # with a convolution, and with attention


@pytest.mark.full("4 to 8 s; test_a_type has 2,048 tokens too", but=("gpt2-192", "*-96"))
@pytest.mark.parametrize(
    ("config", "tokens"), [("gpt2", 192), ("blenderbot", 96), ("recurrent_gemma", 192), ("mixtral", 2048)]
)
def test_tokens_of_the_measured_step(config: str, tokens: int) -> None:
    """No more than a table of positions has, and few for a model that loops over them, as recurrences do."""
    assert report_of(config)["tokens"] == tokens


@pytest.mark.full("1 to 30 s each", but=("gemma4_assistant",))
@pytest.mark.parametrize("name", model_types())
def test_every_type(name: str) -> None:
    """Whatever error a type's own code raises, the user reads a table or one error."""
    result = check(name)
    assert result.exit_code in (0, 1) and "Traceback" not in result.output
    assert result.exit_code == 0 or " is refused: " in result.stdout or result.stdout.startswith("error: "), result


@pytest.mark.usefixtures("few_tokens")
def test_a_model_that_differs() -> None:
    """Its attention mixes heads before its second call of the attention function."""
    result = check("diffllama")
    assert result.exit_code == 1
    assert "DiffLlamaDecoderLayer is refused: the gradient of" in result.stdout
    assert "what is refused or left untiled trains as before" in result.stdout
    said = f"Not tiled: layer of DiffLlamaDecoderLayer; with any other part tiled,{EQUAL}."
    assert result.stdout.endswith(f"\n{said}\n")
    assert "head_groups" not in result.stdout, "a column that would be empty"
    assert "loss" in result.stdout and "mlp" in result.stdout


@pytest.mark.full("6 s", but=("True",))
@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize("scale_is_forgotten", [False, True])
def test_variants(scale_is_forgotten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default Granite's layers add their outputs unscaled; scaled by 0.5 they do not."""
    if scale_is_forgotten:
        monkeypatch.setattr(sweep, "unproven", lambda model: lambda part, module: None)  # which would refuse it
        monkeypatch.setattr(layer, "decoder_layer", lambda *args, **given: decoder_layer(*args, **given | {"scale": 1}))
    result = check("granite", *([] if scale_is_forgotten else ["--json"]), variants="--variants")
    assert result.exit_code == scale_is_forgotten
    if scale_is_forgotten:
        printed = " ".join(result.stdout.split())
        said = r"other batches\): \d+ right, 1 different residual_multiplier=0.5 is different: the gradient"
        assert re.search(said, printed), printed
        assert printed.endswith(f"All parts can be tiled:{EQUAL}, but not in every variant.")
        return
    report = json.loads(result.stdout)
    assert {line["how"] for line in report["lines"]} == {"fused"} and not report["differs"]
    assert len(report["variants"]) > 20 and all(row["how"] != "different" for row in report["variants"])


@pytest.mark.usefixtures("few_tokens")
def test_with_its_own_weights(tmp_path: Path) -> None:
    LlamaForCausalLM(small_config(LlamaConfig())).save_pretrained(tmp_path)
    assert {line["how"] for line in lines(tmp_path, "--full").values()} == {"fused"}
    shown = check(tmp_path, "--full").stdout
    assert "head_groups" in shown and "trains as before" not in shown
    console = Console(width=80, record=True, soft_wrap=True, file=io.StringIO())
    print_report(run(CheckOptions(str(tmp_path), variants=False)), console)
    narrow = console.export_text()
    assert "2 LlamaDecoderLayer fused" in narrow and "head_groups" in narrow, "names are whole in 80 columns"
    assert max(map(len, narrow.splitlines()[1:6])) <= 80


AUTO = {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}
ENCODER = "BertForMaskedLM is an encoder, whose loss seqtile does not tile; expected a causal language model"
NOWHERE = "expected a config.json, a directory with one, a name on the hub, or a model type"


def test_a_mistyped_model_type_is_answered_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = check("qwen3_mo")
    assert result.exit_code == 1 and "did you mean qwen3_moe?" in result.stdout


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model_type": "vit"}, "model type 'vit' has no head over a vocabulary"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ENCODER),
        ({"model_type": "no such"}, NOWHERE),
        ({"model_type": "llama", "hidden_size": "wide"}, "expected int, got str"),
        ({"model_type": "mine", "auto_map": AUTO}, "--trust-remote-code"),
        ({"model_type": "llama", "architectures": 7, "hidden_act": "nope"}, "cannot be built small: KeyError: 'nope'"),
        ({"model_type": ["llama"]}, f"{NOWHERE} such as llama, got none that can be read: TypeError"),
        ({"model_type": "blip"}, "BlipForConditionalGeneration does not run on text alone"),
        ({}, "expected a config.json"),
    ],
)
def test_bad_input(tmp_path: Path, fields: dict, error: str) -> None:
    if fields:
        (tmp_path / "config.json").write_text(json.dumps(fields))
    result = check(tmp_path if fields else tmp_path / "nothing")
    assert result.exit_code == 1 and error in result.stdout and "Traceback" not in result.output


def test_a_name_that_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked once; no pipe is waited for."""
    asked: list[str] = []

    def unreachable(url: str) -> None:
        asked.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    os.mkfifo(tmp_path / "pipe")
    for model, said in (("nobody/nothing", "Name or service not known"), (tmp_path / "pipe", "a pipe or a device")):
        result = check(model)
        assert result.exit_code == 1 and said in result.stdout
    assert len(asked) == 1
