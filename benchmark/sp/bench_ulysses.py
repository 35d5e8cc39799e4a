"""One long sequence over several ranks: seqtile and DeepSpeed's Ulysses, a training step of a small model.

Beside them stands `huggingface`: one process that has the whole sequence, on a CPU with all cores, on one GPU. A
contestant runs in a process tree of its own. One that is wrong is listed with what it sends and with its error.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark.conftest import DEADLINE
from benchmark.device import DEVICE, DTYPE, peak_bytes, synchronize
from benchmark.sp import rank
from benchmark.sp.cases import SIZES, Case, cases, shape_of
from benchmark.subject import Absent, needs

RANKS = torch.cuda.device_count() if DEVICE == "cuda" else 2
WRONG = 1e-3  # relative error in float32, where rounding makes 1e-6

Row = dict[str, Any]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    size = metafunc.config.getoption("--size")
    found = [case for name in SIZES["small" if size == "smoke" else size] for case in cases(name)]
    found = found[:1] if size == "smoke" else found
    metafunc.parametrize("case", found, ids=lambda case: f"{case}, {case.tokens}")
    metafunc.parametrize("contestant", ["huggingface", *rank.CONTESTANTS])


def run_ranks(contestant: str, todo: list[Case]) -> tuple[dict[Case, Row], str]:
    """What the ranks of one process tree found, and what they wrote as they died, if they did."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # this process shares a GPU with one of the ranks
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // RANKS))}
    environment |= {"DS_ACCELERATOR": "cpu"} if DEVICE == "cpu" else {}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rows.jsonl"
        file.touch()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += [rank.__file__, contestant, json.dumps(todo), str(file)]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {Case(*row.pop("case")): row for row in rows}, result.stderr if result.returncode else ""


@cache
def measure(contestant: str, shape: str, tokens: int, heads: str | None) -> dict[Case, Row]:
    """Cases that one process can do. A tree that runs out of memory ends there; another goes on with the next case."""
    todo = [case for case in cases(shape) if case.tokens == tokens and heads in (None, case.heads)]
    rows: dict[Case, Row] = {}
    while todo:
        found, error = run_ranks(contestant, todo)
        rows |= found
        todo = [case for case in todo if case not in rows]
        assert not error or "OutOfMemoryError" in error, error[-6000:]
        if todo:
            rows[todo.pop(0)] = {"status": "out of memory"}
    return rows


def over_ranks(contestant: str, case: Case) -> Row:
    """What the ranks found: the slowest, the largest and the one that sends most."""
    heads = None if rank.CONTESTANTS[contestant].any_heads else case.heads
    row = dict(measure(contestant, case.shape, case.tokens, heads)[case])
    if "refused" in row:
        return {"status": "absent", "why": row["refused"]}
    if "ranks" in row:
        ranks = row.pop("ranks")
        if row["error"] < WRONG:
            row |= {key: max(of_rank[key] for of_rank in ranks) for key in ("seconds", "peak_bytes")}
            row["status"] = "measured"
        else:
            row |= {"status": "wrong", "why": f"relative error {row['error']:.1e}"}
        row["wire"] = max(
            (of_rank["wire"] for of_rank in ranks), key=lambda wire: sum(sent for _, sent in wire["layer"].values())
        )
    return row


def in_one_process(case: Case) -> Row:
    """One process that has the whole sequence."""
    model, batch = rank.prepared(case, DTYPE)
    step = rank.step_of(model, lambda: model(**batch).loss)
    try:
        peak, seconds = peak_bytes(step), []
        for _ in range(rank.ROUNDS):
            start = time.perf_counter()
            step()
            synchronize()
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "why": str(error)[:400]}
    return {"status": "measured", "error": 0.0, "peak_bytes": peak, "seconds": statistics.median(seconds)}


def check_seqtile(case: Case, row: Row) -> None:
    """seqtile is right, and what was counted is what it must send: q and k, v of other ranks' heads, and back."""
    assert row["status"] == "measured", f"{row['status']}: {row.get('why')}"
    passes = 3 if case.checkpointed else 2  # forward, its recomputation, backward
    calls, sent = row["wire"]["layer"]["all_to_all"]
    assert calls == 2 * passes
    q_heads, kv_heads = map(int, case.heads.split("/"))
    if q_heads % RANKS == kv_heads % RANKS == 0:
        token = shape_of(case.shape).head_dim * 2 * (q_heads + kv_heads) // RANKS * DTYPE.itemsize
        assert sent == passes * token * (RANKS - 1) * case.tokens // RANKS


def test_ulysses(record, request: pytest.FixtureRequest, contestant: str, case: Case) -> None:
    row: Row = {"status": "no time left"}
    try:
        if RANKS < 2:
            raise Absent("needs two GPUs")
        if contestant == "deepspeed":
            needs("deepspeed", gpu=False)
        if time.time() < request.config.stash[DEADLINE]:
            row = in_one_process(case) if contestant == "huggingface" else over_ranks(contestant, case)
    except Absent as absent:
        row = {"status": "absent", "why": str(absent)}
    info = {"subject": "ulysses", "contestant": contestant, "shape": str(case), "tokens": case.tokens}
    seconds = row.pop("seconds", None)
    record(info | row | {"group_size": RANKS}, [seconds] if seconds else [])
    if contestant == "seqtile" and row["status"] not in ("absent", "no time left", "out of memory"):
        check_seqtile(case, row)
