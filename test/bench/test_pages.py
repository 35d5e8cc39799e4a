"""The pages show plans and results exactly as `make table` writes them, and turn from predicted to measured by
themselves."""

import shutil
from pathlib import Path

import pytest
from benchmark import gpu_page, pages, plan_pages, predicted_times, readme
from benchmark.results import Results, SubjectResults, load, save
from benchmark.shapes import K

SHOWN = sorted({*pages.PAGES.values(), *plan_pages.PAGES.values(), readme.PICTURE})
WHERE = "MADE UP GPU"


def copied(root: Path) -> None:
    for name in SHOWN:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pages.ROOT / name, root / name)


def test_make_table_changes_nothing(tmp_path: Path) -> None:
    copied(tmp_path)
    pages.write(tmp_path)
    for name in SHOWN:
        assert (tmp_path / name).read_text() == (pages.ROOT / name).read_text(), f"{name} is old; make table writes it"


def test_the_picture_tells_readmes_story() -> None:
    """Each line of the picture ends further right than the previous one of its colour, and the best of the other
    packages further than seqtile without offload."""
    found = readme.longest()
    for color in (readme.PEERS, readme.OURS):
        ends = [found[label] for label, (_, of_line) in readme.LINES.items() if of_line in color]
        assert len(ends) >= 3 and ends == sorted(ends)
    assert found["seqtile, whole layers, head chunks"] < found[readme.BEST_OF_PEERS] < found[readme.BEST]
    text = (pages.ROOT / readme.PICTURE).read_text()
    assert "Predicted peak GPU memory (GiB)" in text
    assert all(f"{label}: {tokens:,}" in text for label, tokens in found.items())


def check(what: str, right: bool = True) -> dict:
    return {"what": what, "error": "0.5" if right else "nan", "allowed": 1.0, "right": right}


def timed(contestant: str, ms: float, subject: str = "decoder_layer") -> dict:
    about = {"subject": subject, "contestant": contestant, "shape": "llama3_8b", "tokens": 4 * K, "status": "measured"}
    times = {f"{name}_{key}": ms for name in ("forward", "backward", "both") for key in ("ms", "iqr_ms")}
    return about | times | {"flops": 1e12, "rounds": 3, "peak_bytes": 2**30}


def longest_row(label: str, tokens: int, gib: float = readme.ROOM - 1) -> dict:
    step = {"tokens": tokens, "layers": 2, "bytes": 60 * 2**30, "seconds": 1.0, "tokens_per_second": 1.0}
    row = {
        "subject": "model_step",
        "contestant": readme.MEASURED_BY[label],
        "status": "measured",
        "error": 1e-3,
    }
    row |= {"steps": [step | {"utilisation": 0.5}], "ended_by": "memory", "failed_at": tokens + K, "both_ms": 1.0}
    return row | {"shape": "llama3_8b", "limit_bytes": int(gib * 2**30), "predicted": tokens}


def made_up(directory: Path, name: str, size: str, **rows: list[dict]) -> Path:
    """Writes results that nobody measured."""
    subjects = {
        part.replace("__", " "): SubjectResults("abc", 1.0, 800.0, 4000.0, found) for part, found in rows.items()
    }
    save(Results(WHERE, "2000-01-01", size, machine={}, subjects=subjects), directory / f"{name}.json")
    return directory / f"{name}.json"


RIGHT = {
    "kernels": [check("one kernel"), {"what": "sdpa", "case": "a head group", "chooses": "CUDNN_ATTENTION"}],
    "few__steps": [check("gradients"), {"what": "plan", "planned_bytes": 11 * 2**30, "of": 12 * 2**30}],
    "long__attention": [check("output")],
}


def test_checks_that_are_right_or_wrong(tmp_path: Path) -> None:
    """README's paragraph and the page of benchmarks; lengths stay predicted."""
    made_up(tmp_path, "right", "right", **RIGHT)
    said = " ".join(readme.paragraph(tmp_path).split())
    longest, default, peers = (readme.longest()[label] for label in (readme.BEST, readme.DEFAULT, readme.BEST_OF_PEERS))
    assert said == (
        f"**Predicted, not measured: {longest:,} tokens of Llama-3.1-8B with LoRA fit in 64 GiB** (four fifths of an "
        "80 GiB GPU) with all options on, plus a calculated 211 GiB of host memory. seqtile without "
        f"options should reach {default:,}. Liger, offload and DeepSpeed's tiled MLP together are predicted to reach "
        f"{peers:,}. All 3 [checks on the GPU](docs/benchmarks.md#measured-on-a-gpu) pass (MADE UP GPU)."
    )
    page = gpu_page.block(tmp_path)
    assert "| kernels | 1 of 1 | MADE UP GPU, 2000-01-01, abc |" in page and "wrong" not in page
    assert (
        "stays free; not measured." in " ".join(readme.caption(tmp_path).split()) and not readme.measured(tmp_path)[0]
    )
    made_up(tmp_path, "right", "right", **RIGHT | {"kernels": [check("one kernel", False)]})
    said = " ".join(readme.paragraph(tmp_path).split())
    assert "**1 of 3 [checks on the GPU](docs/benchmarks.md#measured-on-a-gpu) fail**" in said
    page = gpu_page.block(tmp_path)
    assert "| kernels | one kernel | nan | 1.0e+00 |" in page and "| kernels | 0 of 1 |" in page


def test_attention_and_few_steps(tmp_path: Path) -> None:
    """Tables: which kernel computed a long row, whether it was right, and losses beside the untiled model's."""
    case = "attention, 2,000 tokens, 4 heads"
    timed_row = {"what": case, "sdpa": "CUDNN_ATTENTION", "seconds": 6.81, "peak_gb": 9.7}
    wrong = [check(f"{case}, CUDNN_ATTENTION: {name}", False) for name in ("output", "gradient of q")]
    wrong[0]["error"] = "2.0"  # NaN is worse
    steps = [
        {"what": "untiled", "losses": [3.0, 2.0], "peak_bytes": 2**31, "seconds": 0.5},
        {"what": "first step", "found": "equal", "layers": 2, "width": 64, "tokens": 300, "dtype": "bfloat16"},
        {"what": "seqtile", "losses": [3.0, 2.5], "peak_bytes": 2**30, "seconds": 0.25},
        {"what": "plan", "planned_bytes": 2**29, "of": 2**30},
        {"what": "truth", "losses": [3.0, 2.2]},
        check("gradients of 3 parameters, from the truth; worst: a") | {"allowed": 0.8},
    ]
    rows = {"long__attention": [timed_row, check(f"{case}, CUDNN_ATTENTION: output")]}
    made_up(tmp_path, "right", "right", **rows, few__steps=steps, cuDNN__by__itself=[timed_row, *wrong])
    page = gpu_page.block(tmp_path)
    assert "| long attention | 1 of 1 |" in page and "| cuDNN by itself, without seqtile | 0 of 2 |" in page
    assert "| 2,000 | 4 | cuDNN | yes | 6.8 | 9.0 |" in page
    assert "| 2,000 | 4 | cuDNN, without seqtile | no: gradient of q, error nan | 6.8 | 9.0 |" in page
    assert "| loss, step 2 | 2 | 2.5 |" in page and "| loss of step 2, distance from float32's | 9.1% | 13.6% |" in page
    assert "| gradient of step 1 nearest to its limit, distance from float32's | 40.0% | 50.0% |" in page
    assert "| peak, GiB | 2.00 | 1.00 |" in page and "| planned, GiB |  | 0.50 |" in page


def test_measured_times_stand_beside_predicted_ones(tmp_path: Path) -> None:
    """The prediction, once, with the core of attention at the rate of products."""
    layers = [timed("liger", 20.0), timed("seqtile_layer", 19.0), timed("huggingface", 24.0)]
    file = made_up(tmp_path, "fast", "first", decoder_layer=layers)
    said = " ".join(readme.paragraph(tmp_path).split())
    theirs = "of the time that Hugging Face's takes"
    ratios = f"0.79 {theirs} and 0.95 {theirs} with Liger's kernels"
    assert f"At 4K tokens a layer in chunks takes {ratios} (MADE UP GPU)." in said
    predicted_times.add_to_files(tmp_path)
    found = {row["contestant"]: row.get("predicted_ms") for row in load(file).rows("decoder_layer")}
    core = 1e3 * 9 * 4096**2 * 4096 / 800e12
    assert found["liger"] is None and found["seqtile_layer"] == pytest.approx(found["huggingface"], rel=1e-3)
    assert 9 + core < found["huggingface"] < 13 + core
    page, ratio = gpu_page.block(tmp_path), 19 / found["seqtile_layer"]
    assert "| Hugging Face | 24.0 ms, 1.00 GiB |" in page and "| Liger | 20.0 ms, 1.00 GiB |" in page
    assert f"| seqtile, whole layer | 0.95, 15.20, {ratio:.2f} |" in page
    assert not predicted_times.add_predictions(load(file))


def test_measured_lengths(tmp_path: Path) -> None:
    """Only of the picture's memory, and only lines that were measured; every page is written."""
    results = tmp_path / "results"
    made_up(results, "other", "quick", model_step=[longest_row("Hugging Face", 5 * K, gib=130)])
    assert "not measured" in readme.caption(results)
    assert readme.NOTHING in " ".join(readme.paragraph(results).split())
    made_up(results, "right", "right", **RIGHT)
    made_up(results, "fast", "first", decoder_layer=[timed("liger", 20.0), timed("seqtile_layer", 19.0)])
    made_up(
        results, "long", "quick", model_step=[longest_row("Hugging Face", 27 * K), longest_row(readme.BEST, 800 * K)]
    )
    said = " ".join(readme.caption(results).split())
    assert "stays free; stars: measured on an MADE UP GPU, 2000-01-01. Grey" in said
    said = " ".join(readme.paragraph(results).split())
    assert said.startswith("**Measured on an MADE UP GPU, 2000-01-01, with 2 of 32 layers built and memory set aside")
    assert " for the others: 819,200 tokens of" in said and "Extrapolated from what ran" in said
    every = [longest_row(label, tokens) for label, tokens in readme.longest().items() if label in readme.MEASURED_BY]
    made_up(results, "long", "quick", model_step=every)
    copied(tmp_path)
    pages.write(tmp_path, results)
    text = (tmp_path / "README.md").read_text()
    assert "Nothing has run on a GPU" not in text and "819,200" not in text
    assert WHERE in (tmp_path / readme.PICTURE).read_text()
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "| seqtile, whole layer, head chunks, offload, LoRA | " in page
