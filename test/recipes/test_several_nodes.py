"""`seqtile finetune` as on two nodes, by the lines of docs/several-gpus.md: two torchruns on one machine, of which one
is killed; and the file for Slurm, with stand-ins for its commands."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.test_resume import TEXT, trained
from recipes.tiny_pretrained import save_tiny
from support.assertions import relative_error

SCRIPT, ROOT = Path(__file__).parent / "one_of_nodes.py", Path(__file__).parents[2]
PATHS = os.pathsep.join(map(str, (ROOT / "src", ROOT / "test", ROOT, os.environ.get("PYTHONPATH", ""))))
TORCHRUN = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
PAGE = (ROOT / "docs" / "several-gpus.md").read_text()
[LINE] = re.findall(r"```bash\n(torchrun .*)\n```", PAGE)
[SLURM] = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)
ON_BOTH = 'for node in 1 2; do "$@" & started="$started $!"; done'
IN_ITS_PLACE = {
    "scontrol": "echo 127.0.0.1; echo other",
    "srun": f"{ON_BOTH}; for one in $started; do wait $one || failed=1; done; exit $failed",
    "torchrun": f'exec {TORCHRUN} "$@"',
}
"""The body of each of Slurm's commands, and of torchrun."""


def filled_in(text: str, *arguments: object, port: int) -> str:
    """Returns a page's lines with two ranks on a node of this machine, and a command in the place of train.py."""
    train = shlex.join(map(str, (SCRIPT, "finetune", "--device", "cpu", *arguments)))
    for old, new in (("train.py", train), ("HOST", "127.0.0.1"), ("29500", str(port)), ("-node 8", "-node 2")):
        assert old in text or old == "HOST"
        text = text.replace(old, new)
    return text


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def started(command: list[str], **environment: str) -> subprocess.Popen:
    variables = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def on_two_nodes(*arguments: object, **environment: str) -> list[tuple[int, str]]:
    """Runs the page's line on two nodes; returns each one's exit code and output."""
    line, nodes = filled_in(LINE, *arguments, port=free_port()).replace("torchrun", TORCHRUN), []
    for node in ("0", "1"):
        nodes.append(started(shlex.split(line.replace("--node-rank 0", f"--node-rank {node}")), **environment))
    said = [node.communicate()[0] for node in nodes]
    return [(node.returncode, text) for node, text in zip(nodes, said, strict=True)]


@pytest.fixture
def job(tmp_path: Path) -> tuple[object, ...]:
    save_tiny(tmp_path / "start")
    (tmp_path / "book.txt").write_text(TEXT)
    common = ("--model", tmp_path / "start", "--data", tmp_path / "book.txt", "--seq-len", 50, "--steps", 5)
    return *common, "--learning-rate", 1e-3, "--save-every", 2, "--sequence-parallel", 4


@pytest.mark.full("a minute: twelve processes start")
@pytest.mark.dist
def test_a_node_that_is_killed(job: tuple, tmp_path: Path) -> None:
    """All ranks end, none waits; started again with --resume, both nodes go on to the weights of a run that was not
    ended. Host names tell the nodes."""
    whole, output = tmp_path / "whole", tmp_path / "run"
    found = on_two_nodes(*job, "--output", whole)
    assert [code for code, _ in found] == [0, 0], found
    assert "4 ranks share a sequence, 2 on each of 2 nodes" in found[0][1]
    found = on_two_nodes(*job, "--output", output, KILLED_IN="3")
    assert found[1][0] == -9 and found[0][0] not in (0, -9), found
    assert (output / "checkpoint-2").is_dir() and not (output / "model").exists()
    found = on_two_nodes(*job, "--output", output, "--resume")
    assert [code for code, _ in found] == [0, 0] and "goes on after step 2" in found[0][1], found
    (losses, weights), (expected, those) = trained(output), trained(whole)
    assert losses == pytest.approx(expected, rel=1e-6) and len(losses) == 5
    for name, weight in those.items():  # DDP arranges its buckets anew in the first step after a start
        assert relative_error(weights[name], weight) <= 1e-5, name


@pytest.mark.full("half a minute: four processes start")
@pytest.mark.dist
def test_slurm(job: tuple, tmp_path: Path) -> None:
    """The file for sbatch starts two nodes, with stand-ins for Slurm's commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in IN_ITS_PLACE.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    file = tmp_path / "job.sh"
    file.write_text(filled_in(SLURM, *job, "--output", tmp_path / "run", port=free_port()))
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    sbatch = started(["bash", str(file)], PATH=path, **slurm)
    said, _ = sbatch.communicate()
    assert sbatch.returncode == 0, said
    assert "4 ranks share a sequence, 2 on each of 2 nodes" in said and (tmp_path / "run" / "model").is_dir()
