"""Models that cannot be loaded, and misspelt names: one sentence before any training."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.tiny_pretrained import save_tiny
from seqtile.recipes import resolve_model
from seqtile.recipes.pretrained import load_config, load_model, load_tokenizer

WEIGHTS = "model.safetensors"
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """models/llama, relative to the working directory."""
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def cut(file: str, size: int) -> Callable[[Path], None]:
    return lambda directory: (directory / file).write_bytes((directory / file).read_bytes()[:size]) and None


def configured(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def weights(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def do(directory: Path) -> None:
        held = load_file(directory / WEIGHTS)
        change(held)
        save_file(held, directory / WEIGHTS, metadata={"format": "pt"})

    return do


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut(WEIGHTS, 5000), r"the weights of .* cannot be loaded \(.*not fully covered\); get its files again"),
        (cut(WEIGHTS, 0), r"the weights of .* cannot be loaded"),
        (lambda directory: (directory / WEIGHTS).unlink(), r"the weights of .* cannot be loaded .*no file named model"),
        (lambda directory: (directory / WEIGHTS).rename(directory / "pytorch_model.bin"), "the weights of .* cannot"),
        (weights(lambda held: held.pop(UP)), rf"the weights of .* lack {UP}; get its files again, or"),
        (configured(num_hidden_layers=3), r"lack model.layers.2.input_layernorm.weight, .*, .* and 6 more;"),
        (weights(lambda held: held.update({UP: torch.ones(3, 2)})), rf"{UP} of .* has shape \[3, 2\], but its config"),
        (cut("config.json", 9), r"the configuration of .* cannot be loaded"),
        (configured(num_hidden_layers="two"), r"the configuration of .* cannot be loaded .*expected int, got str"),
        (
            configured(num_key_value_heads=0),
            r"the weights of .* \(ZeroDivisionError: .*, config.json too",
        ),
        (configured(hidden_act="nope"), r"the weights of .* cannot be loaded \(KeyError: 'nope'\)"),
        (configured(vocab_size=-1), r"the weights of .* cannot be loaded \(Trying to create tensor with negative"),
        (configured(model_type="nope"), r"the configuration of .* cannot be loaded .*`nope`"),
        (cut("tokenizer.json", 9), r"the tokenizer of .* cannot be loaded"),
        (lambda directory: (directory / "tokenizer.json").write_text("{}"), r"the tokenizer of .* cannot be loaded"),
    ],
)
def test_damaged_files(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=said) as caught:
        load_config(str(tmp_path))
        load_tokenizer(str(tmp_path))
        load_model(str(tmp_path))
    assert str(caught.value).startswith("--model: ") and "\n" not in str(caught.value)


def test_too_little_memory_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path)

    def full(*args: object, **options: object) -> None:
        torch.empty(2**56)

    monkeypatch.setattr("seqtile.recipes.pretrained.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_model(str(tmp_path))


def test_weights_that_a_config_leaves_out_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path)
    load_model(str(tmp_path))
    assert not caplog.messages
    configured(num_hidden_layers=1)(tmp_path)
    load_model(str(tmp_path))
    [said] = caplog.messages
    assert said.startswith(f"note: --model: config.json of {tmp_path} leaves out some of its weights: model.layers.1.")


def test_code_of_a_model_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    (tmp_path / "code.py").write_text("raise SystemExit('it runs')")
    file = tmp_path / "tokenizer_config.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text())
            | {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", "code.Mine"]}}
        )
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}})
    )
    for load in (load_config, load_tokenizer):
        with pytest.raises(ValueError, match="code of its own, which this command does not run"):
            load(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "models/lama",
            "; did you mean models/llama?; for models/lama of the hub, start where there is no directory",
        ),
        (
            "models/qwen",
            "; models is here, but no qwen in it; for models/qwen of the hub, start where there is no dir",
        ),
        ("./modles/llama", "; did you mean models/llama?"),
        ("modles/llama/", "; did you mean models/llama?"),
        ("modles/lama/deep/er", "; models/llama is here, but no deep in it"),
        ("my model", ""),
        ("/nowhere", ""),
        ("", ""),
    ],
)
def test_what_looks_like_a_path_is_no_hub_name(name: str, said: str, models: None) -> None:
    with pytest.raises(ValueError, match=f"^--model: .*{re.escape(said)}"):
        resolve_model(name)


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--model=~/llama, which a shell passes on unexpanded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    save_tiny(tmp_path / "llama")
    assert resolve_model("~/llama") == (str(tmp_path / "llama"), {})
    with pytest.raises(ValueError, match=f"--model: {tmp_path}/lama does not exist; did you mean {tmp_path}/llama[?]$"):
        resolve_model("~/lama")


@pytest.mark.parametrize(
    ("name", "said"), [("modles/llama", "; did you mean models/llama?"), ("Qwen/Qwen3-8B", ""), ("SmolLM2-1.7B_x", "")]
)
def test_what_a_hub_name_may_mean_otherwise(
    name: str, said: str, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model(name) == (name, {}), "it may be on the hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as caught:
        load_config(name)
    assert f"--model: there is no directory {name} here{said}; and as a hub name it" in str(caught.value)
    assert "the hub could not be reached (" in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_pretrained` tries six times and waits for half a minute."""
    asked = []

    def unreachable(*args: object, **options: object) -> None:
        asked.append(args)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.utils._http._http_backoff_base", unreachable)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    with pytest.raises(ValueError, match=r"the hub could not be reached \(Name or service not known\)"):
        load_config("nobody/nothing")
    assert len(asked) == 1
