"""Results: one file for a device and a day, a list of rows for each subject, and the ratios of a row to others."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


@dataclass
class SubjectResults:
    """What a run of one benchmark file found, with the two ceilings that it measured."""

    commit: str | None
    seconds: float
    matmul_tflops: float | None
    copy_gbs: float | None
    rows: list[Row]


@dataclass
class Results:
    device: str
    date: str
    size: str
    memory_limit_gb: float | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    subjects: dict[str, SubjectResults] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return not self.device.startswith("CPU")

    def rows(self, subject: str) -> list[Row]:
        """With ratios: to what its products alone would take at the device's matmul rate (`x_floor`), to Hugging Face
        (`x_hf`), to Hugging Face with Liger (`x_liger`), to the fastest or smallest contestant that is not seqtile's
        (`x_peer`); of time and of memory."""
        if subject not in self.subjects:
            return []
        found = self.subjects[subject]
        return [row | _ratios(row, found.rows, found.matmul_tflops) for row in found.rows]


def _ratios(row: Row, rows: list[Row], tflops: float | None) -> Row:
    if "both_ms" not in row:
        return {}
    case = ("shape", "tokens")
    others = [other for other in rows if "both_ms" in other and all(other.get(key) == row.get(key) for key in case)]
    peers = [other for other in others if not other["contestant"].startswith(("seqtile", "x "))]
    ratios: Row = {}
    if "flops" in row and tflops:
        ratios["time_x_floor"] = row["both_ms"] / (1000 * row["flops"] / (tflops * 1e12))
    for name, key in (("time", "both_ms"), ("memory", "peak_bytes")):
        found = {peer["contestant"]: peer[key] for peer in peers if peer.get(key)}
        if key in row and found:
            ratios[f"{name}_x_peer"] = row[key] / min(found.values())
            named = {"hf": "huggingface", "liger": "liger"}
            ratios |= {f"{name}_x_{short}": row[key] / found[peer] for short, peer in named.items() if peer in found}
    return ratios


def load(file: Path) -> Results:
    found = json.loads(file.read_text())
    found["subjects"] = {name: SubjectResults(**subject) for name, subject in found["subjects"].items()}
    return Results(**found)


def save(results: Results, file: Path) -> None:
    """All or nothing: a run that is interrupted leaves what was there."""
    file.parent.mkdir(exist_ok=True, parents=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(results), indent=1, allow_nan=False) + "\n")
    partial.replace(file)


def newest(directory: Path = RESULTS, *, subject: str | None = None, gpu: bool = False) -> Path | None:
    """The file that counts: without a memory limit before with one, full before quick, the latest; of those that have
    figures, of this subject if one is named; `gpu`: of a GPU."""
    found = {file: load(file) for file in directory.glob("*.json")}

    def counts(results: Results) -> bool:
        names = results.subjects if subject is None else [subject]
        return any("both_ms" in row for name in names for row in results.rows(name)) and (results.on_gpu or not gpu)

    def rank(file: Path) -> tuple[bool, bool, str]:
        return found[file].memory_limit_gb is None, found[file].size not in ("quick", "first"), found[file].date

    return max((file for file, results in found.items() if counts(results)), key=rank, default=None)
