"""`seqtile finetune` on several processes, against one process that has all of it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from recipes.cases import fitted_on_rank, on_rank, on_rank_without_room, on_slow_rank
from recipes.tiny_pretrained import save_tiny
from seqtile import memory
from seqtile.recipes.pretrained import load_config
from support.pool import Pool

OF_TWO = pytest.mark.parametrize("pool", [(2, "own")], indirect=True, ids=["2"])


@pytest.mark.full("four processes", but=("2-2",))
@pytest.mark.dist
@pytest.mark.parametrize(("pool", "shared"), [((2, "own"), 2), ((4, "own"), 2)], indirect=["pool"], ids=["2-2", "4-2"])
def test_sequences_that_ranks_share(pool: Pool, shared: int, tmp_path: Path) -> None:
    """Losses and weights are those of one process that trains on all groups' sequences in one step."""
    save_tiny(tmp_path / "start")
    (tmp_path / "book.txt").write_text("a long document, " * 500)
    common = ("--model", tmp_path / "start", "--data", tmp_path / "book.txt", "--seq-len", 301, "--steps", 3)
    common = (*map(str, common), "--learning-rate", "1e-3", "--layer")
    over = ("--sequence-parallel", str(shared), "--per-node", "1")
    found = pool.run(on_rank, *common, "--output", str(tmp_path / "run"), *over)
    assert {code for code, _ in found} == {0}, found
    assert [("seqtile: step 3/3" in said) for _, said in found] == [True] + [False] * (len(found) - 1), "one prints"
    groups = str(len(found) // shared)
    code, said = on_rank(*common, "--per-device-train-batch-size", groups, "--output", str(tmp_path / "one"))
    assert code == 0, said
    losses, expected = (
        json.loads((tmp_path / name / "report.json").read_text())["runs"]["seqtile"]["loss"] for name in ("run", "one")
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    start, ours, theirs = (
        load_file(tmp_path / name / "model.safetensors") for name in ("start", "run/model", "one/model")
    )
    for name, weight in theirs.items():
        error = (ours[name] - weight).norm() / (weight - start[name]).norm()
        assert error <= 0.02, f"{name} is {error:.1e} off"  # Adam divides gradients near zero by themselves


@pytest.mark.full("8 s")
@pytest.mark.dist
@OF_TWO
def test_fit_on_ranks_with_different_memory(pool: Pool, tmp_path: Path) -> None:
    """All ranks choose what fits the rank with the least free memory."""
    save_tiny(tmp_path / "model")
    config, tiles = load_config(str(tmp_path / "model")), (("loss", "mlp"), memory.TILES)
    loose, tight = (memory.plan(config, seq_len=4096, dtype="float32", gpus=2, tiles=each).gpu_bytes for each in tiles)
    assert tight <= loose
    found = pool.run(fitted_on_rank, str(tmp_path / "model"), str(tmp_path), (2 * loose, loose))
    assert [code for code, _ in found] == [0, 0] and f"of {loose / 2**30:.1f} GiB, fits" in found[0][1], found


@pytest.mark.full("3 s each", but=("weights-*",))
@pytest.mark.dist
@OF_TWO
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sequence-parallel", "3"), "--sequence-parallel: expected a divisor of the 2 processes, got 3"),
        (("--compare",), "--compare needs a single process"),
        ((), "--model: the weights of"),
    ],
    ids=["divisor", "compare", "weights"],
)
def test_bad_input(pool: Pool, arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """A clear error, printed once, and no rank that waits for another."""
    save_tiny(tmp_path / "start")
    job = ("--model", str(tmp_path / "start"), "--seq-len", "301", "--steps", "1", "--output", str(tmp_path / "run"))
    if not arguments:
        weights = tmp_path / "start" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    found = pool.run(on_rank, *job, *arguments, leaves_traces=True)
    printed = " ".join(" ".join(text for _, text in found).split())
    assert printed.count(message) == 1 and [code for code, _ in found] == [1, 1], found


@pytest.mark.full("10 s")
@pytest.mark.dist
@OF_TWO
def test_a_rank_that_is_slow(pool: Pool, tmp_path: Path) -> None:
    """A checkpoint takes its place when all ranks have written to it."""
    save_tiny(tmp_path / "start")
    found = pool.run(on_slow_rank, str(tmp_path), leaves_traces=True)
    assert [code for code, _ in found] == [0, 0], found
    names = {file.name for file in (tmp_path / "run" / "checkpoint-1").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= names


@pytest.mark.full("10 s")
@pytest.mark.dist
@OF_TWO
def test_no_room_for_the_model(pool: Pool, tmp_path: Path) -> None:
    """The first rank saves it elsewhere, and says where; no rank waits for another."""
    save_tiny(tmp_path / "start")
    found = pool.run(on_rank_without_room, str(tmp_path), leaves_traces=True)
    place = Path(found[0][1].rsplit("it is in ", 1)[1].strip())
    assert [code for code, _ in found] == [1, 0] and load_file(place / "model" / "model.safetensors"), found
