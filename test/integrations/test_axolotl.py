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

from recipes.tiny_pretrained import save_tiny

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
special_tokens: {pad_token: <unk>}
"""
LORA = "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true\n"
LIGER = "plugins: [seqtile.integrations.axolotl.SeqtilePlugin, axolotl.integrations.liger.LigerPlugin]\nseqtile: true\n"
CUT = LIGER.replace("liger.LigerPlugin", "cut_cross_entropy.CutCrossEntropyPlugin")
OWN_CHECKPOINTS = RUN.replace("gradient_checkpointing: true", "gradient_checkpointing: false")
GOOD = {"untiled": RUN, "tiled": RUN + PLUGIN}
MORE = {
    "first": RUN,  # Axolotl seeds a run after its adapters are drawn, so the first of a process draws others
    "untiled lora": RUN + LORA + "lora_mlp_kernel: false\nlora_qkv_kernel: false\nlora_o_kernel: false\n",
    "tiled lora": RUN + LORA + PLUGIN + "seqtile_layer: true\nseqtile_head_groups: 2\nseqtile_attention: varlen\n",
    "tiled, shared": RUN + PLUGIN + "seqtile_share_prefixes: 8\n",
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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and twelve documents, of 101 tokens each, that begin alike."""
    place = tmp_path_factory.mktemp("axolotl")
    torch.manual_seed(0)
    save_tiny(place / "model")
    words = torch.randint(ord("a"), ord("z"), (12, 101))
    words[:, :60] = words[0, :60]
    texts = ("".join(map(chr, row)) for row in words.tolist())
    (place / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return place


@pytest.fixture(scope="module")
def results(place: Path) -> dict[str, dict]:
    return ran(place, GOOD | BAD)


def ran(place: Path, cases: dict[str, str], *launcher: str) -> dict[str, dict]:
    """Returns the result of each YAML, in one process unless a launcher is given."""
    files = [place / f"{i}.yaml" for i in range(len(cases))]
    for file, text in zip(files, cases.values(), strict=True):
        file.write_text(text)
    own = Path(find_spec("axolotl").origin).parents[1]  # which has the TRL that Axolotl pins
    here = os.pathsep.join(str(Path(entry).resolve()) for entry in (own, *sys.path))
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


def assert_same(results: dict[str, dict], tiled: str, untiled: str = "untiled") -> None:
    ours, theirs = results[tiled], results[untiled]
    assert "error" not in ours, ours["error"]
    assert len(theirs["losses"]) == 2 and theirs["tiled"] == [0, 0, 0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["moved"] == pytest.approx(theirs["moved"], rel=1e-6)


def test_same_training(results: dict[str, dict]) -> None:
    assert_same(results, "tiled")
    assert results["tiled"]["tiled"] == [1, 2, 0] and results["tiled"]["saved"] is None


@pytest.mark.full("40 s, of adapters, shared prefixes and offload")
def test_same_training_with_more(place: Path, results: dict[str, dict]) -> None:
    results = results | ran(place, MORE)
    for tiled in ("offload", "tiled, shared"):
        assert_same(results, tiled)
    assert_same(results, "tiled lora", "untiled lora")
    assert results["tiled lora"]["tiled"][2] == results["tiled lora"]["groups"] == results["offload"]["groups"] == 2
    assert results["offload"]["checkpointed"] and results["tiled, shared"]["saved"] >= 60  # of two rows


@pytest.mark.full("40 s; Trainer over ranks is among the tests of every day")
def test_same_training_over_ranks(place: Path, results: dict[str, dict]) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    ours, theirs = ran(place, SHARED, *launcher)["over ranks"], results["untiled"]
    assert "error" not in ours, ours["error"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4), (ours, theirs)
    assert ours["moved"] == pytest.approx(theirs["moved"], rel=1e-6) and ours["tiled"] == [1, 2, 0], (ours, theirs)


def test_collisions_are_refused_by_name(results: dict[str, dict]) -> None:
    """One test: with several, a second process would have the same results to make, or to wait for."""
    said = {message: results[message].get("error", "it ran") for message in BAD}
    assert not {message: error for message, error in said.items() if message not in error}
