"""`seqtile finetune` on several processes, each with a part of a sequence, beside one process that has all of it."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.tiny_pretrained import save_tiny
from seqtile import memory
from seqtile.cli import app
from seqtile.offload.store import KEPT_FREE, available
from seqtile.recipes import Job
from seqtile.recipes.data import load_config, sequences, standard_library
from seqtile.recipes.finetune import fitted
from seqtile.recipes.state import Run, loaded
from seqtile.recipes.train import peak_mib, return_freed_memory, sequence_group
from support.launch import ended, interruptible, ranks, torchrun, torchrun_command
from support.tiny import build

ON_RANKS = "recipes.test_on_ranks:on_ranks"
FINETUNE = ("-m", "seqtile.cli", "finetune", "--device", "cpu")


def on_ranks(*arguments: str) -> None:
    """`seqtile finetune`, in a process that has a rank."""
    app(["finetune", "--device", "cpu", *arguments])


@pytest.mark.full("8 s; ZeRO-3 over groups is among the cases of sp", but=("fsdp2",))
@pytest.mark.dist
@pytest.mark.parametrize("shard", ["fsdp2", "zero3"])
def test_two_groups_of_two(shard: str, tmp_path: Path) -> None:
    """Losses and weights are those of one process that trains on both groups' sequences in a step."""
    save_tiny(tmp_path / "start")
    job = ("--model", str(tmp_path / "start"), "--seq-len", "301", "--steps", "3", "--learning-rate", "1e-3")
    output = tmp_path / "run"
    printed = ranks(4, ON_RANKS, *job, "--output", str(output), "--sequence-parallel", "2", "--shard", shard)
    assert printed.count("seqtile: step 3/3") == 1, "one rank prints"
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


@pytest.mark.full("two minutes; 9 heads over ranks are among the cases of sp")
@pytest.mark.dist
def test_a_real_model_follows_one_process(tmp_path: Path) -> None:
    """SmolLM2-135M: nine heads over two ranks."""
    job = ("--seq-len", "301", "--steps", "3", "--learning-rate", "1e-4")
    alone = [sys.executable, *FINETUNE, *job, "--output", str(tmp_path / "one")]
    subprocess.run(alone, check=True, capture_output=True, timeout=1500)
    torchrun(2, *FINETUNE, *job, "--output", tmp_path / "two", "--sequence-parallel", "2")
    one, two = (json.loads((tmp_path / name / "report.json").read_text())["seqtile"] for name in ("one", "two"))
    assert len(set(one["losses"])) == 3
    assert all(abs(a - b) <= 1e-4 * a for a, b in zip(one["losses"], two["losses"], strict=True)), (one, two)


def chosen_by_fit(model: str, directory: str, *sizes: str) -> None:
    """What `--fit` chooses, on a rank whose machine has its own of these bytes free."""
    proc = Path(directory) / os.environ["RANK"]
    proc.mkdir()
    free = int(sizes[int(os.environ["RANK"])]) + KEPT_FREE
    (proc / "meminfo").write_text(f"MemAvailable: {free // 1024 + 1} kB\n")
    job = Job(model, seq_len=100_000, fit=True, device="cpu", sequence_parallel=2, local_rank=int(os.environ["RANK"]))
    with patch.object(available, "__defaults__", (proc, proc)), sequence_group(job):
        found = fitted(job, Console(quiet=True))
    print(f"chosen: {found.layer} {found.head_groups}", flush=True)


@pytest.mark.dist
def test_fit_on_ranks_with_different_memory(tmp_path: Path) -> None:
    """All choose what fits where least is free, though one of them has room for what costs less."""
    save_tiny(tmp_path)
    setup = {"seq_len": 100_000, "dtype": "float32", "gpus": 2, "sequence_parallel": 2}
    config, tiles = load_config(str(tmp_path)), (memory.TILES, ("loss", "mlp"))
    tight, loose = (memory.plan(config, tiles=each, **setup).gpu_bytes for each in tiles)
    assert tight < loose
    for name, sizes in {"alike": (loose, loose), "different": (loose, tight), "other": (tight, loose)}.items():
        (tmp_path / name).mkdir()
        arguments = (str(tmp_path), str(tmp_path / name), *map(str, sizes))
        printed = ranks(2, "recipes.test_on_ranks:chosen_by_fit", *arguments)
        assert printed.count(f"chosen: {name != 'alike'} None") == 2, (name, printed)


@pytest.mark.dist
def test_bad_input(tmp_path: Path) -> None:
    """A clear error, printed once, and no rank that waits for another."""
    save_tiny(tmp_path / "start")
    job = ("--model", str(tmp_path / "start"), "--seq-len", "301", "--steps", "1", "--output", str(tmp_path / "run"))
    for arguments, message in (
        (("--sequence-parallel", "3"), "--sequence-parallel: sequence_parallel_size is 3, expected a divisor of the 2"),
        (("--shard", "zero9"), "--shard is 'zero9', expected one of fsdp2, zero3"),
        (("--compare",), "--compare is for one process"),
    ):
        found = ended(2, ON_RANKS, *job, *arguments, together=False)
        printed = " ".join(" ".join(rank.out + rank.err for rank in found).split())
        assert printed.count(message) == 1 and all(rank.code == 1 for rank in found), printed
    assert not (tmp_path / "run").exists()
    weights = tmp_path / "start" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])  # only one rank reads them
    found = ended(2, ON_RANKS, *job, together=False)
    printed = " ".join(" ".join(rank.out + rank.err for rank in found).split())
    assert printed.count("--model: the weights of") == 1 and all(rank.code == 1 for rank in found), printed


def memory_to_load(directory: str, *shard: str) -> None:
    """The most memory that a rank holds, beyond what it held before, until its model is sharded."""
    job = Job(directory, device="cpu", local_rank=int(os.environ["RANK"]), **dict(zip(["shard"], shard, strict=False)))
    run = Run(job, load_config(directory), torch.zeros(1, 1, 2, dtype=torch.int64), tiled=True)
    with sequence_group(job) as ctx:
        return_freed_memory()
        before = peak_mib("cpu")
        loaded(run, ctx)
        print(f"held: {peak_mib('cpu') - before:.0f} MiB", flush=True)


@pytest.mark.full("a model of 800 MB, and four processes")
@pytest.mark.dist
@pytest.mark.parametrize(("shard", "most"), [("fsdp2", 0.5), ("zero3", 0.9)])
def test_one_rank_holds_the_whole_model(shard: str, most: float, tmp_path: Path) -> None:
    """The others, three of four, hold their part, in DeepSpeed thrice, and one layer or parameter at a time."""
    build("llama", num_hidden_layers=16, hidden_size=1024, intermediate_size=3072).save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").stat().st_size / 2**20
    found = ended(4, "recipes.test_on_ranks:memory_to_load", str(tmp_path), shard)
    assert not any(rank.code for rank in found), [rank.err[-2000:] for rank in found]
    held = [float(re.search(r"held: (\d+) MiB", rank.out)[1]) for rank in found]
    assert held[0] > 0.8 * whole > 500 and max(held[1:]) < most * whole, (whole, held)


def interrupted_on_ranks(*arguments: str) -> None:
    """The same, where the last rank alone is sent Ctrl-C, after its second step."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever started the tests may ignore
    steps = count(1)
    if os.environ["RANK"] == "1":
        register_optimizer_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT) if next(steps) == 2 else None)
    on_ranks(*arguments)


def assert_saved(tmp_path: Path, printed: str) -> None:
    """All ranks ended after the same step, and what they trained is kept."""
    steps = json.loads((tmp_path / "run" / "report.json").read_text())["steps"]
    assert printed.count(f"interrupted after step {steps} of 20000; what was trained until then is saved") == 1
    start, trained = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("start", "run/model"))
    assert all((a != b).any() for a, b in zip(start.parameters(), trained.parameters(), strict=True))


ENDLESS = ("--seq-len", "50", "--steps", "20000", "--sequence-parallel", "2")


@pytest.mark.dist
def test_one_rank_interrupted(tmp_path: Path) -> None:
    save_tiny(tmp_path / "start")
    job = ("--model", str(tmp_path / "start"), "--output", str(tmp_path / "run"), *ENDLESS)
    found = ended(2, "recipes.test_on_ranks:interrupted_on_ranks", *job, together=False)
    assert [rank.code for rank in found] == [130, 130], found
    assert_saved(tmp_path, "".join(rank.out for rank in found))


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
            with suppress(ProcessLookupError):  # as it should be
                os.killpg(process.pid, signal.SIGKILL)
    assert_saved(tmp_path, printed)
