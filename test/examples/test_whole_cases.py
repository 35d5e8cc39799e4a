"""The examples that load data, train by a trainer and save: each as a user runs it, with a tiny model and JSONL."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    LlavaProcessor,
    PreTrainedTokenizerBase,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from recipes.tiny_pretrained import save_tiny
from seqtile.integrations.trl import restore_trl
from support.assertions import relative_error
from support.pool import Pool
from support.small_example import EXAMPLES, figures, on_rank, run
from support.tiny import build

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ '<' + message['content'] + '>' }}{% endif %}{% endfor %}"
)
GPT_OSS = dict(vocab_size=98, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
GPT_OSS |= dict(head_dim=16, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=4, sliding_window=20)
TO_ALL = dict(num_experts=4, num_experts_per_tok=4)  # a router that rounds otherwise chooses the same experts
OF_IMAGES = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ eos_token }}{% endfor %}"
)
IN_BFLOAT16 = 2e-2  # relative: the effect of another rounding order on a loss, a gradient's norm, and logits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model whose layers 4 bits divide, and a tokenizer with a chat template."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("chat")
    with_tokenizer(directory)
    build("llama", hidden_size=64, intermediate_size=128, max_position_embeddings=1024).save_pretrained(directory)
    return str(directory)


def with_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Saves the tiny tokenizer with a chat template there, and returns it."""
    save_tiny(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "<unk>"
    tokenizer.save_pretrained(directory)
    return tokenizer


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # of other processes
    yield
    restore_trl()


def letters(count: int, among: str = "abcdefgh ") -> str:
    return "".join(among[i] for i in torch.randint(len(among), (count,)).tolist())


def message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def lines(rows: list[dict[str, Any]]) -> str:
    """Writes rows as JSONL and returns the file's name."""
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "data.jsonl"


def assert_merged(base: str, output: str) -> None:
    """The merged model is in bfloat16, without adapters, and its logits are those of the base with the saved ones."""
    peft = pytest.importorskip("peft")
    ids = torch.randint(3, 90, (1, 60))
    merged, missing = AutoModelForCausalLM.from_pretrained(f"{output}/merged", dtype="auto", output_loading_info=True)
    assert merged.dtype == torch.bfloat16 and not any(missing.values())
    assert AutoTokenizer.from_pretrained(f"{output}/merged").chat_template == TEMPLATE
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()
    adapted = peft.PeftModel.from_pretrained(plain, f"{output}/adapter")
    assert_adapted(merged.float(), adapted, input_ids=ids)


def assert_adapted(merged: torch.nn.Module, adapted: Any, **batch: torch.Tensor) -> None:
    """Logits of merged weights, which are rounded to bfloat16, are those with the adapters, which change them."""
    with torch.no_grad():
        truth = adapted(**batch).logits
        error = relative_error(merged(**batch).logits, truth)
        with adapted.disable_adapter():
            before = adapted(**batch).logits
    assert error <= 1e-2 and relative_error(before, truth) > 3 * error


def assert_same(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    """The same losses at each step, and gradient norms as long as rounded weights have not gone apart; losses fall."""
    assert len(ours) == len(theirs) > 2
    for step, ((loss, norm), (their_loss, their_norm)) in enumerate(zip(ours, theirs, strict=True)):
        near = abs(loss / their_loss - 1) <= (IN_BFLOAT16 if step < 2 else 0.1)
        near &= abs(norm / their_norm - 1) <= IN_BFLOAT16 or step > 1
        assert near, f"step {step}: {loss, norm}, untiled {their_loss, their_norm}"
    assert ours[-1][0] < 0.95 * ours[0][0], ours


def test_qlora(model: str) -> None:
    """Trains as untiled over real 4-bit layers; adapters and merged model are saved."""
    pytest.importorskip("bitsandbytes")
    asked = [{"messages": message("user", letters(70 + i)) + message("assistant", "xyz" * 10)} for i in range(4)]
    data, found = lines(asked), {}
    for tiled in (False, True):
        found[tiled] = run("qlora", model, data, tiled=tiled, learning_rate=0.005, gradient_accumulation_steps=1)
    assert_same(*(figures(found[tiled]) for tiled in (True, False)))
    status = found[True]["status"]
    assert (status.layer.tiled, status.layer.reason) == (2, None) and "head chunks" in found[True]["printed"]
    assert type(found[True]["model"].model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear4bit"
    assert_merged(model, "runs/qlora")


@pytest.mark.full("8 s; test/integrations/test_trl.py packs, too")
def test_packing(model: str) -> None:
    """The loss of the packed row is that of its documents, each by itself; adapters and merged model are saved."""
    # With these texts the loss differs by 0.08 if documents see each other; of others it may by chance not differ.
    torch.manual_seed(0)
    texts = [letters(20 + 9 * i, kind) for i, kind in enumerate(("ab", "cd", "ef", "gh", "ij"))]
    options = {"LENGTH": 400, "learning_rate": 0.01, "num_train_epochs": 4, "bf16": "False", "dtype": "torch.float32"}
    found = run("packing", model, lines([{"text": text} for text in texts]), **options)
    [row] = found["trainer"].train_dataset
    rows = torch.tensor(row["input_ids"]).split(row["seq_lengths"])
    untrained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def loss(of: Any, documents: list[torch.Tensor]) -> float:
        sums = [of(input_ids=ids[None], labels=ids[None]).loss.item() * (len(ids) - 1) for ids in documents]
        return sum(sums) / sum(len(ids) - 1 for ids in documents)

    losses = [loss for loss, _ in figures(found)]
    together = loss(untrained, [torch.cat(rows)])
    assert len(rows) == 5 and abs(losses[0] - loss(untrained, rows)) <= 1e-4 < 0.1 * abs(losses[0] - together)
    assert losses[-1] < 0.9 * losses[0] and found["status"].layer.tiled == 2
    saved = AutoModelForCausalLM.from_pretrained("runs/packing/merged", dtype="auto")
    assert loss(saved, rows) < losses[-1] * 1.01
    assert AutoTokenizer.from_pretrained("runs/packing/merged").eos_token == "</s>"


def chats(count: int = 4) -> str:
    rows = [message("user", letters(70 + i)) + message("assistant", "xyz" * 10) for i in range(count)]
    return lines([{"messages": row} for row in rows])


def as_untiled(name: str, output: str, model: str, data: str, **options: float | str) -> dict[str, Any]:
    """Runs an example untiled and tiled, with the same losses and all layers tiled; what is saved is right."""
    options, found = {"learning_rate": 0.005, "gradient_accumulation_steps": 1} | options, {}
    for tiled in (False, True):
        found[tiled] = run(name, model, data, tiled=tiled, **options)
        restore_trl()
    assert_same(*(figures(found[tiled]) for tiled in (True, False)))
    assert (found[True]["status"].loss.tiled, found[True]["status"].layer.tiled) == (0, 2), found[True]["status"]
    return found[True]


@pytest.mark.full("5 s; test_gpt_oss trains over experts too")
def test_mixture_of_experts() -> None:
    """Trains as untiled; adapters and merged model are saved."""
    with_tokenizer(Path("base"))
    build("qwen3_moe", max_position_embeddings=1024, mlp_only_layers=[], **TO_ALL).save_pretrained("base")
    with pytest.warns(UserWarning, match="the model is on cpu"):
        found = as_untiled("mixture_of_experts", "runs/mixture", "base", chats())
    assert found["status"].mlp.tiled == 2, found["status"]
    assert_merged("base", "runs/mixture")


def save_as_mxfp4(model: torch.nn.Module, directory: Path) -> None:
    """Writes the model as gpt-oss is stored: experts as 4-bit numbers, 32 of which share a power of two."""
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, outputs = tensors.pop(name).shape
        blocks = (experts, outputs, width // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, blocks, dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["GptOssForCausalLM"]}))


def test_gpt_oss() -> None:
    """Trains as untiled over weights that transformers decodes from MXFP4; adapters and merged model are saved."""
    with_tokenizer(Path("base"))
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **GPT_OSS))
    save_as_mxfp4(made, Path("base"))
    found = as_untiled("gpt_oss", "runs/gpt_oss", "base", chats())
    assert found["status"].mlp.tiled == 2 and "without masks" in found["printed"], found["printed"]
    assert_merged("base", "runs/gpt_oss")


@pytest.mark.full("4 s; test/sp and test/models train with images too")
def test_images() -> None:
    """Trains as untiled on rows with one and two images; adapters and merged model are saved."""
    peft = pytest.importorskip("peft")
    image = pytest.importorskip("PIL.Image")
    tokenizer = with_tokenizer(Path("base"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    vision = dict(model_type="clip_vision_model", image_size=8, patch_size=4) | sizes
    text = build("llama", vocab_size=102, max_position_embeddings=1024).config.to_dict()
    shape = dict(text_config=text, vision_config=vision, vision_feature_layer=-1)
    config = AutoConfig.for_model("llava", image_token_index=tokenizer.convert_tokens_to_ids("<image>"), **shape)
    AutoModelForImageTextToText.from_config(config).save_pretrained("base")
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    seen = dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
    LlavaProcessor(pictures, tokenizer, chat_template=OF_IMAGES, **seen).save_pretrained("base")
    rows = []
    for i in range(4):
        files = [f"{i}-{j}.png" for j in range(1 + i % 2)]
        for file in files:
            image.fromarray(torch.randint(256, (9, 12, 3), dtype=torch.uint8).numpy()).save(file)
        pair = {"prompt": message("user", letters(70 + i)), "completion": message("assistant", "xyz" * 10)}
        rows.append({"images": files} | pair)
    found = as_untiled("images", "runs/images", "base", lines(rows))
    assert list(found["dataset"].features) == ["images", "prompt", "completion"]
    merged, missing = AutoModelForImageTextToText.from_pretrained(
        "runs/images/merged", dtype="auto", output_loading_info=True
    )
    assert merged.dtype == torch.bfloat16 and not any(missing.values())
    base = AutoModelForImageTextToText.from_pretrained("base", dtype=torch.bfloat16).float()
    adapted = peft.PeftModel.from_pretrained(base, "runs/images/adapter")
    assert {"vision_tower" in name for name, _ in adapted.named_parameters() if "lora" in name} == {False}
    processor = AutoProcessor.from_pretrained("runs/images/merged")
    batch = processor(images=[image.open("0-0.png")], text="<image>abcd", return_tensors="pt")
    assert_adapted(merged.float(), adapted, **batch)


@pytest.mark.full("4 s; test/integrations trains by DPO on shared prompts too")
def test_dpo(model: str) -> None:
    """Trains as untiled and unshared; the prompt is computed once for both answers."""
    answers = {"chosen": message("assistant", "xyz" * 8), "rejected": message("assistant", "abc" * 6)}
    data = lines([{"prompt": message("user", letters(300))} | answers for _ in range(4)])
    options, found = {"learning_rate": 0.001, "gradient_accumulation_steps": 1}, {}
    for tiled in (False, True):
        found[tiled] = run("dpo", model, data, tiled=tiled, **options)
        restore_trl()
    assert_same(*(figures(found[tiled]) for tiled in (True, False)))
    assert math.isclose(figures(found[True])[0][0], math.log(2), rel_tol=1e-3)
    assert "320 of" not in found[False]["printed"] and "302 of" in found[True]["printed"], found[True]["printed"]
    assert_merged(model, "runs/dpo")


@pytest.mark.full("5 s; test/integrations trains by GRPO on shared prompts too")
def test_grpo(model: str) -> None:
    """Completions with different rewards train the adapters; a prompt is computed once for all of them."""
    data = lines([{"prompt": message("user", letters(300)), "answer": letter} for letter in "aeo "])
    options = {"ANSWERS": 8, "LENGTH": 60, "learning_rate": 0.01, "gradient_accumulation_steps": 1}
    found = run("grpo_shared_prompt", model, data, **options)
    history = [entry for entry in found["trainer"].state.log_history if "reward" in entry]
    assert len(history) == 4 and max(entry["reward_std"] for entry in history) > 0
    assert all(math.isfinite(entry["loss"]) for entry in history)
    assert f"{7 * 302:,} of" in found["printed"], found["printed"]
    assert_merged(model, "runs/grpo")


CONFIGS = {"fsdp2": DistributedType.FSDP, "zero3": DistributedType.DEEPSPEED}


def test_accelerate_takes_its_configs() -> None:
    """Accelerate's parser refuses unknown keys of the file, and its command knows those of the plugin."""
    from accelerate.commands.launch import launch_command_parser

    files = {file.stem: file for file in (EXAMPLES / "accelerate").iterdir()}
    assert files.keys() == CONFIGS.keys()
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for name, file in files.items():
        config = load_config_from_file(str(file))
        assert (config.distributed_type, config.num_processes, config.mixed_precision) == (CONFIGS[name], 8, "bf16")
        own = config.fsdp_config | config.deepspeed_config
        assert own == yaml.safe_load(file.read_text())[f"{'fsdp' if name == 'fsdp2' else 'deepspeed'}_config"]
        assert own.keys() <= known.keys(), own.keys() - known.keys()


@pytest.mark.full("a minute: two times two processes under Accelerate, and one")
@pytest.mark.dist
def test_ranks_that_accelerate_launches_train_as_one_untiled_process_does(model: str) -> None:
    data, rate = lines([{"text": letters(100 + i, "ab")} for i in range(6)]), 0.01
    with Pool(1, "own") as pool:
        [theirs] = pool.run(partial(on_rank, learning_rate=rate), "eight_gpus", model, "untiled", data)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for name in CONFIGS:
        config = ["--config_file", str(EXAMPLES / "accelerate" / f"{name}.yaml"), "--num_processes", "2"]
        command = ["-m", "accelerate.commands.launch", *config, str(Path(__file__).with_name("launched.py"))]
        ran = subprocess.run(
            [sys.executable, *command, model, data, f"{name}.json", str(rate)],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-3000:]
        ours = json.loads(Path(f"{name}.json").read_text())
        assert_same(ours["figures"], theirs["figures"])
        assert (ours["kind"], ours["ranks"], ours["layers"], ours["reason"]) == (CONFIGS[name].value, 2, 2, None)
        saved = AutoModelForCausalLM.from_pretrained("runs/eight_gpus/model", dtype=torch.float32)
        ids = torch.tensor([AutoTokenizer.from_pretrained("runs/eight_gpus/model")("ab" * 50).input_ids])
        assert saved(input_ids=ids, labels=ids).loss < 0.6 * theirs["figures"][0][0]
