"""`seqtile finetune` on several processes that share a sequence, against one process that has all of it."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.cases import chosen_by_fit, interrupted_on_rank, memory_to_load, on_rank
from recipes.tiny_pretrained import save_tiny
from seqtile import memory
from seqtile.recipes.data import load_config, sequences, standard_library
from support.launch import interruptible, torchrun_command
from support.pool import Pool
from support.tiny import build

FINETUNE = ("-m", "seqtile.cli", "finetune", "--device", "cpu")
OF_TWO = pytest.mark.parametrize("pool", [(2, "own")], indirect=True, ids=["2"])


@pytest.mark.full("8 s; ZeRO-3 over groups is among the cases of sp", but=("fsdp2",))
@pytest.mark.dist
@pytest.mark.parametrize(
    ("pool", "shard"), [((4, "own"), "fsdp2"), ((4, "own, zero3"), "zero3")], indirect=["pool"], ids=["fsdp2", "zero3"]
)
def test_two_groups_of_two(pool: Pool, shard: str, tmp_path: Path) -> None:
    """Losses and weights are those of one process that trains on both groups' sequences in one step."""
    save_tiny(tmp_path / "start")
    job = ("--model", str(tmp_path / "start"), "--seq-len", "301", "--steps", "3", "--learning-rate", "1e-3")
    output = tmp_path / "run"
    found = pool.run(on_rank, *job, "--output", str(output), "--sequence-parallel", "2", "--shard", shard)
    assert [code for code, _ in found] == [0] * 4, found
    assert ["seqtile: step 3/3" in printed for _, printed in found] == [True, False, False, False], "one rank prints"
    report = json.loads((output / "report.json").read_text())
    assert (report["ranks"], report["sequence_parallel"], report["shard"]) == (4, 2, shard)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start").train()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = sequences(standard_library(), AutoTokenizer.from_pretrained(tmp_path / "start"), 301, 6).rows.view(3, 2, 301)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step, batch in enumerate(rows):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        assert abs(report["seqtile"]["losses"][step] - loss.item()) <= 1e-5 * loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = dict(AutoModelForCausalLM.from_pretrained(output / "model").named_parameters())
    for name, parameter in model.named_parameters():
        error = (trained[name] - parameter).norm() / (parameter - start[name]).norm()
        assert error <= 0.02, f"{name} is {error:.1e} off"  # Adam divides gradients near zero by themselves


@pytest.mark.dist
@OF_TWO
def test_fit_on_ranks_with_different_memory(pool: Pool, tmp_path: Path) -> None:
    """All ranks choose what fits the rank with the least free memory, although another could use cheaper features."""
    save_tiny(tmp_path)
    setup = {"seq_len": 100_000, "dtype": "float32", "gpus": 2, "sequence_parallel": 2}
    config, tiles = load_config(str(tmp_path)), (memory.TILES, ("loss", "mlp"))
    tight, loose = (memory.plan(config, tiles=each, **setup).gpu_bytes for each in tiles)
    assert tight < loose
    for sizes in ((loose, loose), (loose, tight), (tight, loose)):
        found = pool.run(chosen_by_fit, str(tmp_path), str(tmp_path), sizes)
        assert found == [(tight in sizes, None)] * 2, (sizes, found)


@pytest.mark.dist
@OF_TWO
def test_bad_input(pool: Pool, tmp_path: Path) -> None:
    """A clear error, printed once, and no rank that waits for another."""
    save_tiny(tmp_path / "start")
    job = ("--model", str(tmp_path / "start"), "--seq-len", "301", "--steps", "1", "--output", str(tmp_path / "run"))
    for arguments, message in (
        (("--sequence-parallel", "3"), "--sequence-parallel: sequence_parallel_size is 3, expected a divisor of the 2"),
        (("--shard", "zero9"), "--shard: expected one of fsdp2, zero3, got 'zero9'"),
        (("--compare",), "--compare needs a single process"),
        ((), "--model: the weights of"),
    ):
        if not arguments:
            assert not (tmp_path / "run").exists()
            weights = tmp_path / "start" / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-100])  # only one rank reads them
        found = pool.run(on_rank, *job, *arguments)
        printed = " ".join(" ".join(text for _, text in found).split())
        assert printed.count(message) == 1 and [code for code, _ in found] == [1, 1], found


@pytest.mark.full("a model of 800 MB, and four processes")
@pytest.mark.dist
@pytest.mark.parametrize(("shard", "most"), [("fsdp2", 0.5), ("zero3", 0.9)])
def test_one_rank_holds_the_whole_model(shard: str, most: float, tmp_path: Path) -> None:
    """Three of four ranks hold only their part (with DeepSpeed three times), and one layer or parameter at a time."""
    build("llama", num_hidden_layers=16, hidden_size=1024, intermediate_size=3072).save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").stat().st_size / 2**20
    with Pool(4, "own") as pool:  # its peaks are those of this case
        held = pool.run(memory_to_load, str(tmp_path), shard)
    assert held[0] > 0.8 * whole > 500 and max(held[1:]) < most * whole, (whole, held)


def assert_saved(tmp_path: Path, printed: str) -> None:
    """All ranks ended after the same step, and the trained weights are saved."""
    steps = json.loads((tmp_path / "run" / "report.json").read_text())["steps"]
    assert printed.count(f"interrupted after step {steps} of 20000; what was trained until then is saved") == 1
    start, trained = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("start", "run/model"))
    assert all((a != b).any() for a, b in zip(start.parameters(), trained.parameters(), strict=True))


ENDLESS = ("--seq-len", "50", "--steps", "20000", "--sequence-parallel", "2")


@pytest.mark.dist
@OF_TWO
def test_one_rank_interrupted(pool: Pool, tmp_path: Path) -> None:
    save_tiny(tmp_path / "start")
    job = ("--model", str(tmp_path / "start"), "--output", str(tmp_path / "run"), *ENDLESS)
    found = pool.run(interrupted_on_rank, *job, leaves_traces=True)  # the hook
    assert [code for code, _ in found] == [130, 130], found
    assert_saved(tmp_path, "".join(printed for _, printed in found))


@pytest.mark.full("17 s to start; forked ranks are interrupted")
@pytest.mark.dist
def test_torchrun_interrupted(tmp_path: Path) -> None:
    """Ctrl-C reaches torchrun, which passes it on to all ranks."""
    save_tiny(tmp_path / "start")
    job = ("--model", tmp_path / "start", "--output", tmp_path / "run", *ENDLESS)
    command = interruptible(torchrun_command(2, *FINETUNE, *job))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            while "seqtile: step 2/20000" not in (line := process.stdout.readline()):
                assert line, "it ended early"
            os.killpg(process.pid, signal.SIGINT)
            printed, _ = process.communicate(timeout=900)
        finally:
            with suppress(ProcessLookupError):  # as expected
                os.killpg(process.pid, signal.SIGKILL)
    assert_saved(tmp_path, printed)
