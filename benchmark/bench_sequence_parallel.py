"""One long sequence over several ranks: seqtile and DeepSpeed's Ulysses, a training step of a small model.

Beside them stands `huggingface`: one process that has the whole sequence, on a CPU with all cores, on one GPU. A
contestant runs in a process tree of its own. One that is wrong is timed and called wrong.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark import sequence_parallel
from benchmark.contestants import DEVICE, DTYPE, available, run
from benchmark.spread import SIZES, Case, cases, shape_of

RANKS = torch.cuda.device_count() if DEVICE == "cuda" else 2
WRONG = 1e-3  # relative error in float32, where rounding makes 1e-6

Row = dict[str, Any]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = [case for name in SIZES[metafunc.config.getoption("--size") or DEVICE] for case in cases(name)]
    metafunc.parametrize("case", found, ids=lambda case: f"{case}, {case.tokens}")
    metafunc.parametrize("contestant", ["huggingface", *sequence_parallel.CONTESTANTS])


def tree(contestant: str, todo: list[Case]) -> tuple[dict[Case, Row], str]:
    """What the ranks of one process tree found, and what they wrote as they died, if they did."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # this process shares a GPU with one of the ranks
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // RANKS))}
    environment |= {"DS_ACCELERATOR": "cpu"} if DEVICE == "cpu" else {}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rows.jsonl"
        file.touch()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += [sequence_parallel.__file__, contestant, json.dumps(todo), str(file)]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {Case(*row.pop("case")): row for row in rows}, result.stderr if result.returncode else ""


@cache
def measured(contestant: str, shape: str, tokens: int, heads: str | None) -> dict[Case, Row]:
    """Cases that one process can do. A tree that runs out of memory ends there; another goes on with the next case."""
    todo = [case for case in cases(shape) if case.tokens == tokens and heads in (None, case.heads)]
    rows: dict[Case, Row] = {}
    while todo:
        found, error = tree(contestant, todo)
        rows |= found
        todo = [case for case in todo if case not in rows]
        assert not error or "OutOfMemoryError" in error, error[-6000:]
        if todo:
            rows[todo.pop(0)] = {"out_of_memory": True}
    return rows


def proved(case: Case, row: Row) -> None:
    """seqtile is right, and what was counted is what it must send: q and k, v of other ranks' heads, and back."""
    assert "refused" not in row, row["refused"]
    assert row["error"] < WRONG, f"wrong: relative error {row['error']:.1e}"
    passes = 3 if case.checkpointed else 2  # forward, its replay, backward
    calls, sent = row["wire"]["layer"]["all_to_all"]
    assert calls == 2 * passes
    q_heads, kv_heads = map(int, case.heads.split("/"))
    if q_heads % RANKS == kv_heads % RANKS == 0:
        token = shape_of(case.shape).head_dim * 2 * (q_heads + kv_heads) // RANKS * DTYPE.itemsize
        assert sent == passes * token * (RANKS - 1) * case.tokens // RANKS


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
def test_sequence_parallel(benchmark, contestant: str, case: Case) -> None:
    if reason := available(contestant):
        pytest.skip(reason)
    if contestant == "huggingface":
        model, batch = sequence_parallel.prepared(case, DTYPE)
        step = sequence_parallel.step_of(model, lambda: model(**batch).loss)
        run(benchmark, contestant, str(case), case.tokens, step, lambda: 0.0)
        return
    heads = None if sequence_parallel.CONTESTANTS[contestant].any_heads else case.heads
    arguments = (contestant, case.shape, case.tokens, heads)
    row = dict(benchmark.pedantic(measured, arguments, rounds=1)[case])  # its time is in the row
    if "ranks" in row:  # the slowest, the largest and the one that sends most
        for key in ("seconds", "peak_mib"):
            row[key] = max(rank[key] for rank in row["ranks"])
        wires = [rank["wire"] for rank in row["ranks"]]
        row["wire"] = max(wires, key=lambda wire: sum(sent for _, sent in wire["layer"].values()))
        row["wrong"] = not row["error"] < WRONG
    benchmark.group = f"{case}, {case.tokens:,} tokens"
    info = {"contestant": contestant, "shape": str(case), "tokens": case.tokens, "device": DEVICE, "dtype": str(DTYPE)}
    benchmark.extra_info |= info | row | {"group_size": RANKS}
    if contestant == "seqtile" and "out_of_memory" not in row:
        proved(case, row)
