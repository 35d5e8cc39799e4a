"""Results, their ratios, the tables on the pages, and pictures."""

import json
import sys
from pathlib import Path

import pytest
from benchmark import pictures, report, rows
from benchmark.gpu_page import comparisons
from benchmark.pages import blocks
from benchmark.results import Results, SubjectResults, load, newest, save
from benchmark.run import SUBJECTS, file_of, name_of
from matplotlib import image

K, ROOT = 1024, Path(__file__).parents[2]


def entry(contestant: str, tokens: int, status: str, shape: str = "llama3_8b", **found: object) -> dict:
    about = {"subject": "gated_mlp", "contestant": contestant, "shape": shape, "tokens": tokens, "status": status}
    return about | {"flops": 1e12 * tokens / K} | found


def row(contestant: str, tokens: int, ms: float, peak: int, shape: str = "llama3_8b", rounds: int = 3) -> dict:
    times = {f"{name}_{key}": ms for name in ("forward", "backward", "both") for key in ("ms", "iqr_ms")}
    about = {"rounds": rounds, "peak_bytes": peak * 2**30, "error": 1e-3}
    return entry(contestant, tokens, "measured", shape, **times, **about)


STEPS = [
    {"tokens": 8 * K, "layers": 8, "bytes": 2**34, "seconds": 1.5, "tokens_per_second": 5461, "utilisation": 0.41},
    {"tokens": 60 * K, "layers": 2, "bytes": 2**36, "seconds": 9.5, "tokens_per_second": 6467, "utilisation": 0.5},
]
METHOD = {"subject": "model_step", "shape": "llama3_8b", "status": "measured", "steps": STEPS, "tokens": 60 * K}
METHOD |= {"limit_bytes": 80 * 10**9, "error": 1e-3, "ended_by": "memory", "both_ms": 9500.0}
DTYPE = {"dtype": "float32"}
ENDED = {"failed_at": 64 * K, "predicted": 62 * K}
HOST = {"ended_by": "time", "host_bytes": 57 * 2**30, "in_host_memory": ["a", "b"]}
ROWS = {
    "gated_mlp": [
        row("huggingface", 8 * K, 40, 8),
        row("liger", 8 * K, 25, 6),
        row("seqtile", 8 * K, 20, 2),
        row("huggingface", 8 * K, 1, 1, "qwen3_8b"),
        entry("huggingface", 64 * K, "out of memory", why="CUDA out of memory\nof a long story"),
        row("liger", 64 * K, 400, 48, rounds=1),
        row("seqtile", 64 * K, 100, 3),
        entry("cce", 64 * K, "absent", why="not installed"),
    ],
    "model_step": [
        METHOD | {"contestant": "huggingface"} | ENDED,
        METHOD | {"contestant": "seqtile_loss"} | HOST,
        {"subject": "model_step", "contestant": "liger", "status": "absent", "why": "liger_kernel is not installed"},
    ],
}


@pytest.fixture
def results() -> Results:
    machine = {"device": "NVIDIA H200", "driver_version": "580.1", "versions": {"torch": "2.11", "quack": "absent"}}
    found = Results("NVIDIA H200", "2026-11-21", "quick", 80.0, machine)
    found.subjects = {name: SubjectResults("abc1234", 60.0, 800.0, 4300.0, rows) for name, rows in ROWS.items()}
    return found


def test_ratios(results: Results) -> None:
    found = {(row["contestant"], row["tokens"], row["shape"]): row for row in results.rows("gated_mlp")}
    ours, longer = (found["seqtile", tokens, "llama3_8b"] for tokens in (8 * K, 64 * K))
    ratios = {"time_x_floor": 20 / 10, "time_x_hf": 20 / 40, "memory_x_hf": 2 / 8}  # 8e12 FLOP at 800 TFLOP/s: 10 ms
    ratios |= dict.fromkeys(("time_x_peer", "time_x_liger"), 20 / 25)
    ratios |= dict.fromkeys(("memory_x_peer", "memory_x_liger"), 2 / 6)
    assert {name: ours[name] for name in ratios} == ratios
    assert longer["time_x_peer"] == 0.25 and "time_x_hf" not in longer
    assert not [key for key in found["cce", 64 * K, "llama3_8b"] if "_x_" in key]


def lines_of(results: Results) -> list[str]:
    return "\n\n".join(comparisons(results, Path("nvidia-h200-2026-11-21.json"))).splitlines()


def test_what_pages_would_show(results: Results) -> None:
    lines, text = lines_of(results), "\n".join(lines_of(results))
    assert set(lines) >= {
        "| The MLP, checkpointed | 8K | 64K |",
        "| Hugging Face | 40.0 ms, 8.00 GiB | out of memory |",
        "| seqtile | 20.0 ms, 2.00 GiB | 100.0 ms, 3.00 GiB |",
        "| seqtile's time as a multiple of: Liger's, that of its matmuls | 8K | 64K |",
        "| seqtile | 0.80, 2.00 | 0.25, 1.25 |",
        "| Liger | absent |  |  |  |  |  |  |",
    }
    assert not any("CCE" in line for line in lines)  # which was not installed
    ladder = [line.split(" | ") for line in lines if "| 6,467 | 50% |" in line]
    assert [line[:3] for line in ladder] == [
        ["| Hugging Face", "61,440", "63,488"],
        ["| seqtile, loss (a, b in host memory: 57 GiB, calculated)", "> 61,440", ""],
    ]
    assert all(float(peak) > 0 and float(planned) > 0 for *_, peak, planned, _, _, _ in ladder)
    assert (
        "**NVIDIA H200, memory limited to 80 GB**, 2026-11-21, commit abc1234; driver 580.1, torch 2.11. A large square"
        in text
    )
    assert "of forward and backward (from 64K tokens on, of a single repeat); peak" in text
    assert "quack" not in text and "(../benchmark/results/nvidia-h200-2026-11-21-gated_mlp.png)" in text


def test_a_layer_over_liger(results: Results) -> None:
    """Ratios by length; none where Liger has no figure."""
    results.subjects["decoder_layer"] = results.subjects.pop("gated_mlp")
    results.subjects["decoder_layer"].rows[5] = entry("liger", 64 * K, "out of memory", why="")
    lines = lines_of(results)
    at = lines.index("| seqtile's time as a multiple of: Liger's, that of its matmuls | 8K | 64K |")
    assert lines[at + 2 : at + 4] == ["| seqtile | 0.80, 2.00 | -, 1.25 |", ""]


def test_what_died_is_shown(results: Results, tmp_path: Path) -> None:
    """Shows a process that measured nothing, not even its ceilings; a wrong contestant's error; no ulysses on one
    GPU."""
    died = {"subject": "masked_prompt", "contestant": "(all)", "status": "failed", "why": "pytest ended with -11"}
    results.subjects = {"masked_prompt": SubjectResults(None, 1.0, None, None, [died])} | results.subjects
    results.subjects["model_step"].rows.insert(0, died | {"subject": "model_step"})
    results.subjects["gated_mlp"].rows[-1] = entry("cce", 64 * K, "wrong", why="", error=3.0)
    needs_two = entry("seqtile", 8 * K, "absent", "llama3_8b 32/8", group_size=1)
    results.subjects["ulysses"] = SubjectResults("abc1234", 1.0, 800.0, 4300.0, [needs_two])
    lines = lines_of(results)
    assert "| CCE |  | wrong, error 3e+00 |" in lines
    assert all(
        part in "\n".join(lines)
        for part in ("commit None and abc1234; driver", "ran at 800 TFLOP/s", "| Longest sequence in 74.5 GiB |")
    )
    report.print_tables(results)
    save(results, tmp_path / "a.json")
    assert newest(tmp_path, subject="ulysses") is None and newest(tmp_path, gpu=True) is not None


def test_a_report_has_every_figure(
    results: Results, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    """Every figure of a finished run, of a subject and a method that did not finish, and of checks."""
    checks = [{"what": "a kernel", "error": "0.5", "allowed": 1.0, "right": True}]
    checks += [{"what": "rotary", "error": "nan", "allowed": 0.25, "right": False}]
    checks += [{"what": "norm", "right": False, "why": "no kernel"}, {"what": "tests", "says": "3 passed"}]
    results.subjects["kernels"] = SubjectResults("abc1234", 0.0, None, None, checks)
    save(results, tmp_path / "found.json")
    rows.append(tmp_path / "found-gated_mlp.jsonl", {"device": "NVIDIA H100", "matmul_tflops": 700.0})
    rows.append(tmp_path / "found-gated_mlp.jsonl", {"id": "test[a]", "row": row("liger", 8 * K, 33, 6)})
    unfinished = {"status": "measured", "ended_by": "death", "steps": STEPS}
    (tmp_path / "model_step-liger.unfinished").write_text(json.dumps(unfinished))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    report.main()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    longest = "| huggingface | | 61,440 | 9.50 | | 61,440 | 65,536 | 63,488 | 64.00 |"
    assert {line[: len(longest)] for line in lines if line.startswith("| huggingface | | 61,440")} == {longest}
    assert set(lines) >= {
        "gated_mlp: NVIDIA H200, 2026-11-21, quick, commit abc1234",
        "60 s; at most 800.0 TFLOP/s in matmuls, 4,300 GB/s in copies",
        f"| llama3_8b | 8,192 | seqtile |{' 20.00 |' * 4} 3 | | 2.00 | 0.50 | 0.80 | 0.80 | 2.000 | 0.25 | 0.33 | "
        "0.33 | 1.0e-03 |",
        f"| llama3_8b | 65,536 | huggingface |{' |' * 14} out of memory |",
        "huggingface: out of memory, CUDA out of memory",
        "memory was limited to 80 GB",
        "1 of 3 checks are right",
        "| rotary | nan | 2.5e-01 |",
        "| norm | no kernel | |",
        "- tests: says 3 passed",
        "gated_mlp: NVIDIA H100, not ended, found-gated_mlp, commit None",
        "model_step: ?, not ended, model_step-liger, commit None",
    }
    assert [line for line in lines if line.startswith("| liger | | 61,440 | 9.50 | | > 61,440 |")]


def test_a_planned_peak_is_that_of_the_step() -> None:
    """Of the row's dtype and layers."""
    step = METHOD | {"contestant": "huggingface"}
    half, whole, short = (float(report.planned_peak(step | more, 8 * K)) for more in ({}, DTYPE, {"layers": 8}))
    assert 1.6 * half < whole and short < 0.7 * half


def test_pictures(results: Results, tmp_path: Path) -> None:
    """Pictures show the measured values, in greys."""
    found = pictures.draw(results, tmp_path / "found.json")
    assert [path.name for path in found] == ["found-gated_mlp.png", "found-longest.png"]
    for path in found:
        pixels = image.imread(path)[..., :3]
        assert pixels.min() < 0.2 and pixels.max() == 1
        assert (pixels.max(axis=-1) - pixels.min(axis=-1)).max() < 0.01


def test_files(results: Results, tmp_path: Path) -> None:
    assert name_of(results) == "nvidia-h200-2026-11-21-quick-80gb"
    save(results, tmp_path / "a.json")
    assert load(tmp_path / "a.json") == results and [path.name for path in tmp_path.iterdir()] == ["a.json"]
    results.size, results.memory_limit_gb = "full", None
    assert name_of(results) == "nvidia-h200-2026-11-21"
    save(results, tmp_path / "b.json")
    results.device, results.date = "CPU, 2 threads", "2026-12-01"
    save(results, tmp_path / "c.json")
    assert newest(tmp_path) == tmp_path / "c.json" and newest(tmp_path, gpu=True) == tmp_path / "b.json"
    assert newest(tmp_path, subject="ulysses") is None
    assert blocks(tmp_path)["gpu"].startswith("**NVIDIA H200**, ")
    results.subjects["gated_mlp"].matmul_tflops = float("nan")
    with pytest.raises(ValueError):
        save(results, tmp_path / "c.json")
    assert load(tmp_path / "c.json").subjects["gated_mlp"].matmul_tflops == 800


def test_subjects_have_files() -> None:
    assert {file_of(subject) for subject in SUBJECTS} == set(ROOT.glob("benchmark/**/bench_*.py"))
