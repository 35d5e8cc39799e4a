"""Axolotl's own loader and trainer with seqtile's plugin, on a tiny model.

`make test` runs it with the transformers that Axolotl pins, see dev/axolotl.txt.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from support.tiny import VOCAB, build

pytestmark = pytest.mark.skipif(find_spec("axolotl") is None, reason="axolotl is not installed")
PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
PLUGIN = re.search(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.S | re.M)[1]  # what users copy
RUN = """
base_model: model
datasets: [{path: data.jsonl, ds_type: json, type: completion}]
sequence_len: 101
max_steps: 2
micro_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 0.01
lr_scheduler: constant
optimizer: sgd
output_dir: out
dataset_num_proc: 1
bf16: false
tf32: false
use_cpu: true
gradient_checkpointing: true
seed: 1
"""
LORA = "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true\n"
LIGER = "plugins: [seqtile.integrations.axolotl.SeqtilePlugin, axolotl.integrations.liger.LigerPlugin]\nseqtile: true\n"
CUT = LIGER.replace("liger.LigerPlugin", "cut_cross_entropy.CutCrossEntropyPlugin")
OWN_CHECKPOINTS = RUN.replace("gradient_checkpointing: true", "gradient_checkpointing: false")
GOOD = {
    "untiled": RUN,
    "tiled": RUN + PLUGIN,
    "untiled lora": RUN + LORA + "lora_mlp_kernel: false\nlora_qkv_kernel: false\nlora_o_kernel: false\n",
    "tiled lora": RUN + LORA + PLUGIN + "seqtile_layer: true\nseqtile_head_groups: 2\n",
    "untiled, alike": RUN.replace("data.jsonl", "alike.jsonl"),
    "tiled, shared": RUN.replace("data.jsonl", "alike.jsonl") + PLUGIN + "seqtile_share_prefixes: 8\n",
    "offload": OWN_CHECKPOINTS + PLUGIN + "seqtile_layer: true\nseqtile_head_groups: auto\nseqtile_offload: true\n",
}
BAD = {  # a plugin stays registered, so those with others come last
    "seqtile_layer: expected seqtile: true": RUN + PLUGIN.replace("true", "false") + "seqtile_layer: true\n",
    "seqtile: true and tiled_mlp tile the same part of a model; leave one out": RUN + PLUGIN + "tiled_mlp: true\n",
    "seqtile: true and lora_mlp_kernel": RUN + LORA + PLUGIN + "lora_mlp_kernel: true\n",
    "seqtile_fit chooses seqtile_layer": OWN_CHECKPOINTS + PLUGIN + "seqtile_fit: true\nseqtile_layer: true\n",
    "seqtile_head_groups: expected seqtile_layer: true": RUN + PLUGIN + "seqtile_head_groups: 2\n",
    "seqtile_offload checkpoints by itself": RUN + PLUGIN + "seqtile_offload: true\n",
    "seqtile_share_prefixes: expected seqtile: true": RUN
    + PLUGIN.replace("true", "false")
    + "seqtile_share_prefixes: 8\n",
    "seqtile_sequence_parallel: expected": RUN + PLUGIN + "seqtile_sequence_parallel: 2\nrl: dpo\n",
    "gpu_memory_gib: torch sees no GPU": OWN_CHECKPOINTS + PLUGIN + "seqtile_fit: true\n",
    "seqtile: true and liger_glu_activation": RUN + LIGER + "liger_glu_activation: true\n",
    "seqtile: true and liger_fused_linear_cross_entropy": RUN + LIGER + "liger_fused_linear_cross_entropy: true\n",
    "seqtile: true and cut_cross_entropy": RUN + CUT,
}


SHARED = {"over ranks": RUN + PLUGIN + "seqtile_sequence_parallel: 2\n"}


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, documents and `results.json`. The first worker of pytest-xdist makes it for all."""
    root = tmp_path_factory.getbasetemp()
    place = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "axolotl"
    with FileLock(f"{place}.lock"):
        if not (place / "results.json").exists():
            place.mkdir(exist_ok=True)
            write_inputs(place)
            (place / "results.json").write_text(json.dumps(ran(place, GOOD | BAD)))
    return place


def write_inputs(place: Path) -> None:
    from support.trl_trainers import tokenizer

    torch.manual_seed(0)
    build("llama").save_pretrained(place / "model")
    tokenizer().save_pretrained(place / "model")
    words = torch.randint(3, VOCAB, (12, 240)).tolist()
    alike = [words[0][:60] + row[:41] for row in words]
    for name, rows in {"data.jsonl": words, "alike.jsonl": alike}.items():
        texts = (" ".join(f"w{i}" for i in row) for row in rows)
        (place / name).write_text("\n".join(json.dumps({"text": text}) for text in texts))


@pytest.fixture(scope="session")
def results(place: Path) -> dict[str, dict]:
    return json.loads((place / "results.json").read_text())


def ran(place: Path, cases: dict[str, str], *launcher: str) -> dict[str, dict]:
    """Returns the result of each YAML, in one process unless a launcher is given."""
    files = [place / f"{i}.yaml" for i in range(len(cases))]
    for file, text in zip(files, cases.values(), strict=True):
        file.write_text(text)
    here = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    environment = os.environ | {"PYTHONPATH": here, "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true"} if launcher else {}
    worker = Path(__file__).with_name("axolotl_worker.py")
    ended = subprocess.run(
        [sys.executable, *launcher, str(worker), *map(str, files)],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
    )
    found = [json.loads(line[7:]) for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(files), ended.stdout[-2000:] + ended.stderr[-4000:]
    return dict(zip(cases, found, strict=True))


def test_same_training(results: dict[str, dict]) -> None:
    pairs = {"tiled": "untiled", "offload": "untiled", "tiled lora": "untiled lora", "tiled, shared": "untiled, alike"}
    for tiled, untiled in pairs.items():
        ours, theirs = results[tiled], results[untiled]
        assert "error" not in ours, ours["error"]
        assert len(theirs["losses"]) == 2 and theirs["tiled"] == [0, 0, 0]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
        assert ours["moved"] == pytest.approx(theirs["moved"], rel=1e-6)
    assert results["tiled"]["tiled"] == [1, 2, 0] and results["tiled lora"]["tiled"][2] == 2
    assert results["tiled lora"]["groups"] == results["offload"]["groups"] == 2
    assert results["offload"]["checkpointed"]
    assert results["tiled"]["saved"] is None and results["tiled, shared"]["saved"] >= 60  # of two rows


@pytest.mark.full("40 s; Trainer over ranks is among the tests of every day")
def test_same_training_over_ranks(place: Path, results: dict[str, dict]) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    ours, theirs = ran(place, SHARED, *launcher)["over ranks"], results["untiled"]
    assert "error" not in ours, ours["error"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4), (ours, theirs)
    assert ours["moved"] == pytest.approx(theirs["moved"], rel=1e-6) and ours["tiled"] == [1, 2, 0], (ours, theirs)


@pytest.mark.parametrize("message", BAD)
def test_collisions_are_refused_by_name(message: str, results: dict[str, dict]) -> None:
    assert message in results[message].get("error", "it ran")
