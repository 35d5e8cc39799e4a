"""`seqtile plan`: its output, and that it needs neither torch nor a network."""

import ast
import inspect
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import seqtile
from seqtile import memory
from seqtile.cli import app
from seqtile.recipes.plan import MIN_SHARED

LLAMA = "meta-llama/Llama-3.1-8B"
ON_80 = {"gpu_memory_gib": 64}  # what a step may fill of 80 GiB
PREDICTED = ((memory.plan, {"seq_len": 8000}), (memory.longest, {}))


def said(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], terminal_width=120)
    assert result.exit_code == exit_code, result.output
    return result.output


def test_tables() -> None:
    text = said(LLAMA, "--gpus", "8", "--offload", "optimizer")
    over_8 = {"gpus": 8, "sequence_parallel": 8, "batches": "whole", "offload": ("optimizer",)}  # as the script has it
    for _, longest in memory.ladder(LLAMA, **ON_80, **over_8):
        assert f"{longest.tokens:,}" in text
    assert "8.03 billion parameters" in text and "8 GPUs, ZeRO-3, each of 80 GiB, 64 for a step\n" in text
    for line in ("apply_seqtile(model, layer=True)", 'sp.initialize(8), batches="whole")', "offload.enable(model, "):
        assert line in text
    text = said("google/gemma-2-9b", "--gpus", "8", "--offload", "optimizer")
    assert "seqtile.apply_seqtile(model)" in text and "apply_liger_kernel_to_gemma2" in text


def test_least_is_turned_on_that_a_length_needs() -> None:
    options = ("--gpus", "8", "--offload", "optimizer", "--seq-len")
    text = said(LLAMA, *options, "880000")
    assert "apply_seqtile(model, layer=True)" in text and "sp.initialize(8)" in text and "offload.enable" not in text
    assert "1 x 880,000 tokens" in text
    text = said(LLAMA, *options, "110000")
    assert "apply_seqtile(model, mlp=False)" in text and "sp.initialize" not in text
    text = said(LLAMA, *options, "20000")
    assert "apply_seqtile" not in text and "gradient_checkpointing_enable" in text


def test_it_says_that_it_predicts_and_where_seqtile_is_not_needed(tmp_path: Path) -> None:
    tiny, needless = (
        config_file(tmp_path, "llama"),
        "\nseqtile is not needed: 4,000 tokens are predicted to fit without",
    )
    for model, options, needed in (
        (tiny, ("--seq-len", "4000"), False),
        (tiny, ("--seq-len", "4000", "--layer"), True),
        (tiny, ("--seq-len", "4000", "--gpus", "2", "--sequence-parallel", "2"), True),
        (tiny, ("--seq-len", "4000", "--only", "host"), True),
        (tiny, ("--seq-len", "4000", "--attention", "varlen"), True),
        (tiny, (), True),
        (LLAMA, ("--lora-rank", "8", "--only", "nothing"), True),
        (LLAMA, ("--lora-rank", "8", "--seq-len", "4000"), False),
        (LLAMA, ("--lora-rank", "8", "--seq-len", "90000"), True),
    ):
        text = said(model, *options)
        assert "* A step of 1 x " in text and "at its predicted peak" in text and "Longest sequence, predicted" in text
        assert len(re.findall(r"│ +\* [\d,]+ │", text)) == 1
        assert (needless in text) == ("seqtile is not needed" in text) == (not needed), options
    assert "predicted not to fit" in said(LLAMA, "--seq-len", "4000", exit_code=1)
    assert json.loads(said(LLAMA, "--json"))["predicted"] is True


def test_layers_tiled_as_a_whole() -> None:
    """Planned if nothing else reaches the length, or if requested."""
    options = ("--offload", "optimizer", "--offload", "weights")
    rungs = [found.tokens for _, found in memory.ladder(LLAMA, **ON_80, offload=("optimizer", "weights"))][2:]
    plain, whole = "apply_seqtile(model)", "apply_seqtile(model, layer=True)"
    by_groups = 'apply_seqtile(model, layer=True, head_groups="auto")'
    for tokens, line, moved in zip(rungs, (plain, whole, whole, by_groups), (False, False, True, True), strict=True):
        text = said(LLAMA, *options, "--seq-len", str(tokens))
        assert line in text and f"{tokens:,}" in text and ("offload.enable" in text) == moved
    few, groups = ("--seq-len", "9000"), rungs[-1]
    text = said(LLAMA, *options, *few, "--layer")
    assert whole in text and "offload.enable" not in text
    assert by_groups in said(LLAMA, *options, *few, "--head-groups", "auto")
    found = json.loads(said(LLAMA, *options, "--head-groups", "4", "--json"))
    assert [rung["head_groups"] for rung in found["longest"]][-2:] == [None, 4]
    assert found["plan"]["setup"]["head_groups"] == 4 and "layer" in found["plan"]["setup"]["tiles"]
    assert found["plan"]["seq_len"] == found["longest"][-1]["tokens"] < groups
    assert "seqtile.apply_seqtile(model, layer=True, head_groups=4)" in found["turn_on"]


def test_a_share_of_the_card_is_kept_free() -> None:
    """By default a fifth; another by --margin; the first line says how much a step may fill."""
    options, given = ("--lora-rank", "8", "--only", "loss,MLP"), {"lora_rank": 8, "tiles": ("loss", "mlp")}
    share, card = random.choice([1 / 8, 1 / 4, 3 / 8]), random.choice([40, 80, 192])
    for margin, kept in (((), 0.2), (("--margin", str(share)), share), (("--margin", "0"), 0)):
        text = said(LLAMA, *options, "--gpu-memory", str(card), *margin)
        longest = memory.longest(LLAMA, gpu_memory_gib=card - card * kept, **given)
        assert (
            f"* {longest.tokens:,} " in text
            and f"1 GPU of {card} GiB{f', {card - card * kept:g} for a step' * bool(kept)}\n" in text
        )


def test_what_does_not_fit() -> None:
    text = said(LLAMA)
    title, verdict, *_ = text.splitlines()
    assert title.startswith(LLAMA) and verdict == "This is predicted not to fit in GPU memory: weights and optimizer."
    assert "Longest" not in text and "A step" not in text, "tables of nothing but 0"
    for options in (("optimizer",), ("optimizer", "weights")):
        setup = {"tiles": memory.TILES, "head_groups": "auto"}
        longest = memory.longest(LLAMA, **ON_80, offload=("activations", *options), **setup)
        assert re.search(rf"With {' '.join(f'--offload {part}' for part in options)}: {longest.tokens:,} tokens", text)
    text = said("Qwen/Qwen3-32B", "--gpus", "8", "--seq-len", "5000000", exit_code=1)
    assert "--offload optimizer:" in text and "weights:" not in text, "only what makes it longer"
    setup = {"gpus": 32, "sequence_parallel": 32, "tiles": memory.TILES, "offload": ("activations",)}
    assert memory.longest("Qwen/Qwen3-32B", **ON_80, **setup).tokens > 5e6
    assert "With --gpus 32: " in text and "--gpus 16" not in text, "as few as will do"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--gpus", "4", "--zero-stage", "0", "--lora-rank", "8"), "DistributedDataParallel(model)"),
        (("--gpus", "4", "--zero-stage", "2", "--lora-rank", "8"), "DeepSpeed's ZeRO-2"),
        (("--gpus", "16"), "# torchrun --nnodes 2 ... --nproc-per-node 8 this_script.py"),
        (("--gpus", "16", "--hsdp"), '("cuda", (2, 8), mesh_dim_names=("dp_replicate", "dp_shard"))  # starts'),
        (("--gpus", "16", "--hsdp"), "MixedPrecisionPolicy(torch.bfloat16, torch.float32), mesh=mesh)"),
        (("--gpus", "16", "--flat"), 'sp.apply_ulysses(model, sp.initialize(16, per_node=16), batches="whole")'),
        (("--gpus", "16"), 'sp.apply_ulysses(model, sp.initialize(16), batches="whole")'),
        (("--gpus", "8", "--sequence-parallel", "8", "--seq-len", "9000"), "sp.initialize(8)"),
        (("--gpus", "4"), "fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))"),
        (("--gpus", "4", "--lora-rank", "8"), "    fully_shard(module, mp_policy="),
        (("--gpus", "4", "--offload", "optimizer"), "DeepSpeed's ZeRO-3 with optimizer offloaded to the CPU"),
        (("--offload", "optimizer", "--offload", "weights"), 'offload.enable(model, device="cuda")'),
        (("--lora-rank", "8", "--load-in-4bit"), 'bnb_4bit_quant_type="nf4"'),
        (("--lora-rank", "8"), 'get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))'),
    ],
    ids=str,
)
def test_what_to_turn_on(options: tuple[str, ...], line: str) -> None:
    assert any(line in said_line for said_line in json.loads(said(LLAMA, *options, "--json"))["turn_on"])


def test_several_nodes() -> None:
    """What nodes send each other, and how long that takes, is said to be arithmetic; nothing is said of one node."""
    options = ("--gpus", "16", "--per-node", "8", "--seq-len", "1000000")
    text, told = said(LLAMA, *options, "--network", "400"), json.loads(said(LLAMA, *options, "--json"))["plan"]
    sent = told["node_receives_gb"]
    total = sent["attention"] + sent["weights"]
    assert f"A node receives {total:,.1f} GB from others in a step: {sent['attention']:,.1f} of attention" in text
    assert f"({sent['flat']:,.1f} with heads over all GPUs)" in text and f"{total / 400:.2f} s at 400 GB/s" in text
    assert "This is arithmetic, not measured." in text and sent["flat"] == pytest.approx(
        3 * sent["attention"], rel=1e-3
    )
    assert json.loads(said(LLAMA, *options, "--network", "400", "--json"))["plan"]["node_receives_seconds"] == round(
        total / 400, 3
    )
    assert "all GPUs are on one node" in said(LLAMA, "--gpus", "8", "--seq-len", "1000", "--network", "400")
    uneven = ("--gpus", "24", "--sequence-parallel", "12", "--seq-len", "12000")
    assert "unequal numbers of the GPUs that share a sequence" in said(LLAMA, *uneven, "--network", "4")
    assert "GB/s" not in said(LLAMA, *options) and "A node" not in said(LLAMA, "--gpus", "8", "--seq-len", "100000")
    assert json.loads(said(LLAMA, "--gpus", "8", "--seq-len", "1000", "--json"))["plan"]["node_receives_gb"] is None
    assert "--network: expected more than 0 GB/s, got 0.0" in said(LLAMA, *options, "--network", "0", exit_code=1)


def test_shared_tokens() -> None:
    """Sequences with a shared prefix: their plan, and how GPUs share them."""
    options = ("--gpus", "8", "--offload", "optimizer", "--batch-size", "8", "--shared-tokens", "30000")
    text = said(LLAMA, *options, "--seq-len", "32000")
    assert "A step of 8 x 32,000 tokens, of which 30,000 are shared, at its predicted peak" in text
    assert "  seqtile.share_prefixes(model)\n" in text
    told = json.loads(said(LLAMA, *options, "--seq-len", "200000", "--layer", "--json"))
    assert told["plan"]["setup"]["shared_tokens"] == 30_000 and told["plan"]["setup"]["batches"] == "whole"
    assert not any(row["head_groups"] for row in told["longest"])
    default = inspect.signature(seqtile.share_prefixes).parameters["min_tokens"].default
    assert default == MIN_SHARED
    assert "seqtile.share_prefixes(model, min_tokens=100)" in said(LLAMA, *options[:-1], "100", "--seq-len", "32000")


def test_the_row_of_the_planned_step_is_marked_and_rows_of_zero_are_left_out() -> None:
    options = ("--lora-rank", "8", "--batch-size", "2", "--shared-tokens", "30000")
    given = {"lora_rank": 8, "batch_size": 2, "shared_tokens": 30_000, "batches": "whole"}
    lengths = [found.tokens for _, found in memory.ladder("Qwen/Qwen3-8B", gpu_memory_gib=32, **given)]
    fitting = [tokens for tokens in lengths if tokens]
    assert 1 < len(fitting) < len(lengths)
    seq_len = random.choice(fitting)
    for asked, row in ((("--seq-len", str(seq_len)), min(n for n in lengths if n >= seq_len)), ((), max(lengths))):
        text = said("Qwen/Qwen3-8B", "--gpu-memory", "40", *options, *asked)
        rows = re.findall(r"│ +(\* )?([\d,]+) │ [\w ]+ +│$", text, re.MULTILINE)
        marks = [int(tokens.replace(",", "")) for mark, tokens in rows if mark]
        assert len(rows) == len(fitting) and marks == [row] and "\n* A step of 2 x" in text
        assert f"Nothing fits in the {len(lengths) - len(fitting)} setups that are left out." in text


def test_a_config_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once, and only for what is neither here nor known; it says so where it cannot be reached."""
    config_file(tmp_path, "llama")
    asked: list[str] = []

    def unreachable(url: str) -> None:
        asked.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    text = said("Qwen/Qwen3-14B", exit_code=1)
    assert "did you mean" not in text, "Qwen3-4B is another model"
    assert "the hub could not be reached (Name or service not known)" in text and len(asked) == 1
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", asked.append)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: str(tmp_path / "config.json"))
    here, there = (said(model, "--json") for model in (str(tmp_path), "somebody/tiny"))
    assert here.replace(str(tmp_path), "somebody/tiny") == there and len(asked) == 2
    for model in (str(tmp_path), LLAMA, "qwen/qwen3-8b"):
        said(model)
    assert len(asked) == 2


@pytest.mark.parametrize("option", ["seq-len", "gpus", "batch-size", "lora-rank", "gpus-per-node", "shared-tokens"])
def test_numbers_beyond_all_bounds(option: str) -> None:
    for number in (10**30, 10**400):
        text = said(LLAMA, f"--{option}", str(number), exit_code=1)
        assert text.startswith(f"error: --{option}: expected ") and " below 2**60, got 1000" in text and len(text) < 200


def test_nonsense_in_a_config(tmp_path: Path) -> None:
    """One sentence, and soon: ten million layers are planned as fast as two."""
    config_file(tmp_path, "llama")
    fields = json.loads((tmp_path / "config.json").read_text())
    for changes, code in (({"hidden_size": 10**400}, 1), ({"num_hidden_layers": 10**7}, 0)):
        (tmp_path / "config.json").write_text(json.dumps(fields | changes))
        text = said(str(tmp_path), exit_code=code)
        assert "config's hidden_size: expected a positive int below 2**60" in text or not code


def test_paths_are_said_as_they_are(tmp_path: Path) -> None:
    """Neither markup nor emoji of Rich; no file that never ends is read."""
    for name in ("[/b]", "[draft] x", ":smile:"):
        (tmp_path / name).mkdir(parents=True)
        text = said(config_file(tmp_path / name, "llama"))
        assert text.startswith(f"{tmp_path}/{name}: ") and f'from_pretrained("{tmp_path}/{name}"' in text
    os.mkfifo(tmp_path / "pipe")
    assert "got a pipe or a device; pass a file" in said(str(tmp_path / "pipe"), exit_code=1)


def config_file(directory: Path, model_type: str) -> str:
    fields = {"model_type": model_type, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    (directory / "config.json").write_text(json.dumps(fields | {"num_attention_heads": 4, "vocab_size": 100}))
    return str(directory)


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    new = config_file(tmp_path, "new")
    text = said(new)
    assert "note: model type new is not known; planned as a Llama, which may be far off" in text
    assert "seqtile.apply_seqtile(model)" in text and "apply_liger" not in text
    first, second = json.loads(said(new, "--json"))["notes"]
    assert first == "model type new is not known; planned as a Llama, which may be far off"
    assert second.startswith("it cannot be simulated: ") and "expected a config.json" in second


@pytest.mark.parametrize(
    ("options", "loaded", "applied"),
    [
        ((), None, "model"),  # sdpa, Hugging Face's own choice, computes plain rows by FlashAttention
        (("--rows", "packed"), "flash_attention_2", "model"),
        (("--attention", "sdpa"), None, "model"),
        (("--attention", "varlen", "--rows", "packed"), None, 'model, attention="varlen"'),
        (("--attention", "sdpa", "--rows", "packed"), None, 'model, attention="varlen"'),
        (("--attention", "eager"), None, 'model, attention="varlen"'),
    ],
)
def test_attention(options: tuple[str, ...], loaded: str | None, applied: str) -> None:
    """What its figures assume is said, and what it loads; attention without masks is a row where the model's makes
    some."""
    shown = said(LLAMA, "--lora-rank", "8", "--seq-len", "100000", *options)
    changed = ("--rows" in options and "sdpa" in options) or "eager" in options
    attention = "as below" if changed else next((x for x in options if x in ("varlen", "sdpa")), "flash")
    rows = "packed" if "packed" in options else "plain"
    assert f"every layer checkpointed; {rows} rows, attention: {attention}\n" in shown
    assert (f'attn_implementation="{loaded}"' in shown) == (loaded is not None)
    assert f"seqtile.apply_seqtile({applied})" in shown


def test_attention_alone_may_do() -> None:
    options = ("--lora-rank", "8", "--attention", "eager", "--seq-len", "20000")
    assert 'apply_seqtile(model, mlp=False, loss=False, attention="varlen")' in said(LLAMA, *options)
    only = ("--only", "loss,MLP")
    text = said(LLAMA, *options, *only, exit_code=1)
    assert "does not fit" not in text and "predicted not to fit in GPU memory: attention" in text


def test_json() -> None:
    found = json.loads(
        said("google/gemma-2-9b", "--gpus", "4", "--sequence-parallel", "2", "--seq-len", "300000", "--json")
    )
    assert not any(rung["tiled_layer"] for rung in found["longest"])
    assert [rung["sequence_parallel"] for rung in found["longest"]] == [1, 1, 1, 2, 2, 2]
    plan = found["plan"]
    assert plan["seq_len"] == 300_000 and plan["fits"] is True and plan["setup"]["gpus"] == 4
    assert max(plan["moments_gib"].values()) == pytest.approx(sum(plan["gpu_gib"].values()), abs=0.01)


@pytest.mark.parametrize(
    ("options", "setup"),
    [
        (["--only", "nothing"], {"tiles": ()}),
        (["--only", "MLP, loss,Host"], {"offload": ("activations",)}),
        (
            ["--only", "loss,liger", "--offload", "optimizer"],
            {"tiles": ("loss",), "liger": True, "offload": "optimizer"},
        ),
        (["--only", "loss,mlp", "--layer", "--head-groups", "4"], {"tiles": memory.TILES, "head_groups": 4}),
        (["--only", "loss,mlp", "--accumulate"], {"accumulate": True}),
    ],
)
def test_just_these_features(options: list[str], setup: dict) -> None:
    """Only these features are planned, and their longest sequence is the only one."""
    found = json.loads(said(LLAMA, "--gpu-memory", "200", "--margin", "0", "--seq-len", "8000", *options, "--json"))
    planned, longest = (f(LLAMA, gpu_memory_gib=200, **given | setup) for f, given in PREDICTED)
    assert sum(found["plan"]["gpu_gib"].values()) == pytest.approx(planned.gpu_bytes / 2**30, abs=0.01)
    assert [row["tokens"] for row in found["longest"]] == [longest.tokens]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [LLAMA, "--only", "loss,mlps"],
            "--only: expected nothing, or some of loss, MLP, layer, host, Liger, got mlps",
        ),
        ([LLAMA, "--only", "loss", "--layer"], "mlp too, since it is tiled with the layer"),
        ([LLAMA, "--gpu-memory", "-1"], "--gpu-memory: expected more than 0 GiB, got -1.0"),
        (["Qwen3-8B"], "did you mean Qwen/Qwen3-8B?"),
        (["no/such"], "model 'no/such': expected a directory with a config.json"),
        ([LLAMA, "--margin", "1"], "--margin: expected a share, at least 0 and less than 1, got 1.0"),
        ([LLAMA, "--margin", "nan"], "--margin: expected a share, at least 0 and less than 1, got nan"),
        ([LLAMA, "--seq-len", "0"], "--seq-len: expected a positive int, got 0"),
        ([LLAMA, "--shared-tokens", "9"], "--batch-size: expected 2 or more sequences, which begin with shared_tokens"),
        (
            [LLAMA, "--shared-tokens", "9", "--seq-len", "9", "--batch-size", "2"],
            "--shared-tokens: expected fewer than the 9 tokens of a sequence, got 9",
        ),
        ([LLAMA, "--gpus", "2", "--sequence-parallel", "4"], "expected a divisor of the 2 GPUs"),
        ([LLAMA, "--gpus", "16", "--per-node", "0"], "--gpus-per-node: expected a positive int, got 0"),
        (
            [LLAMA, "--gpus", "12"],
            "--gpus: expected whole nodes of 8 GPUs (--per-node says how many a node has), got 12",
        ),
        (["google/gemma-2-9b", "--layer"], "model type gemma2: whole layers are not planned; expected one of"),
        ([LLAMA, "--head-groups", "3"], "--head-groups: expected a divisor of the 8 kv heads, got 3"),
        ([LLAMA, "--head-groups", "all"], "--head-groups: expected a positive int"),
        ([LLAMA, "--head-groups", "²"], "--head-groups: expected a positive int"),
        ([LLAMA, "--gpus", "4", "--head-groups", "4"], "--head-groups: expected at most 2 groups, so that each of"),
        ([LLAMA, "--gpus", "8", "--head-groups", "auto"], "--head-groups: 8 kv heads over 8 GPUs make no groups"),
        ([LLAMA, "--offload", "activations"], "leave activations out"),  # which are tried in any case
        ([LLAMA, "--offload", "nothing"], "--offload: expected some of optimizer, weights, got nothing"),
        (["/proc/1/root"], "Permission denied") if Path("/proc/1").exists() else (["x" * 5000], "File name too long"),
    ],
)
def test_errors(arguments: list[str], message: str) -> None:
    assert message in said(*arguments, exit_code=1)


def test_it_loads_nothing(tmp_path: Path) -> None:
    """It answers at once because it loads neither torch nor transformers, for a name and for a config.json."""
    script = f"""
import sys
from typer.testing import CliRunner
from seqtile.cli import app
for model in ("{LLAMA}", {config_file(tmp_path, "llama")!r}):
    result = CliRunner().invoke(app, ["plan", model, "--gpus", "8"])
    assert result.exit_code == 0, result.output
print(sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert result.stdout == "[]\n", result.stdout + result.stderr


def test_a_length_beyond_the_configuration() -> None:
    note = "note: it is configured for 8,192 positions at most"
    assert note in said("google/gemma-2-9b", "--gpus", "8", "--seq-len", "9000")
    assert note not in said("google/gemma-2-9b", "--gpus", "8", "--seq-len", "8192")


def test_lines_to_turn_on_are_a_script(tmp_path: Path) -> None:
    """Each name in them is imported in them, and the model is named as it was asked for."""
    for arguments in (
        ("--gpus", "4", "--lora-rank", "8", "--load-in-4bit"),
        ("--gpus", "4", "--layer", "--autocast", "--seq-len", "9000"),
        ("--only", "loss,Liger", "--offload", "weights"),
        ("--gpus", "4"),
    ):
        moved = ("--offload", "optimizer") if len(arguments) > 2 else ()
        lines = json.loads(said(LLAMA, *arguments, *moved, "--json"))["turn_on"]
        nodes = list(ast.walk(ast.parse("\n".join(lines))))
        known = {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
        known |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        assert not {node.id for node in nodes if isinstance(node, ast.Name)} - known, lines
        assert any(f'from_pretrained("{LLAMA}"' in line for line in lines)
    assert f'from_pretrained("{tmp_path}"' in said(f"{config_file(tmp_path, 'llama')}/config.json")


def test_nothing_is_cut_off_in_a_pipe(tmp_path: Path) -> None:
    tiny = config_file(tmp_path, "llama")
    text = said(tiny, "--gpu-memory", "8000", "--margin", "0", "--host-memory", "100000")
    longest = max(found.tokens for _, found in memory.ladder(tiny, gpu_memory_gib=8000, host_memory_gib=100_000))
    assert longest > 1e8 and f"{longest:,}" in text and "…" not in text
    assert re.search(r": \d+ thousand parameters", text)
