"""Puts the ledger's predicted times beside measured ones: `predicted_ms` in the rows of a result file, see `ledger`.

At the rates of products and copies that the same run reached. The core of attention, which the ledger leaves out,
counts at the rate of products. No kernel of attention reaches it, so a layer's prediction is too short, the more the
longer the sequence.
"""

from collections.abc import Callable
from pathlib import Path

from benchmark.ledger import predicted, steps
from benchmark.rates import Rates
from benchmark.results import Results, Row, Subject, load, save
from benchmark.shapes import LENGTHS, SHAPES


def core_flops(subject: str, shape: str, tokens: int) -> float:
    """Of attention in a layer under checkpointing: four products in the two forwards, five in the backward, of which
    causality leaves half."""
    return 9 * 2.0 * tokens**2 / 2 * SHAPES[shape].q if subject == "decoder_layer" else 0.0


def add(results: Results) -> bool:
    """Whether a row got its prediction."""
    if not results.on_gpu or results.size not in LENGTHS:
        return False
    wanted = {
        f"{name} {row['shape']}-{row['tokens']} {row['contestant']}": (subject, row)
        for name, subject in results.subjects.items()
        for row in subject.rows
        if "both_ms" in row and "shape" in row and "predicted_ms" not in row and subject.matmul_tflops
    }
    found = False
    for name, operands, contestant in steps(results.size) if wanted else ():
        if name in wanted:
            subject, row = wanted[name]
            row["predicted_ms"] = milliseconds(subject, row, predicted(operands, contestant).seconds)
            found = True
    return found


def milliseconds(subject: Subject, row: Row, seconds: Callable[[Rates], float]) -> float:
    rates = Rates(subject.matmul_tflops * 1e12, subject.copy_gbs * 1e9)
    core = core_flops(row["subject"], row["shape"], row["tokens"]) / rates.flops
    return round(1e3 * (seconds(rates) + core), 3)


def add_to(directory: Path) -> None:
    """To every result file of a GPU there."""
    for file in sorted(directory.glob("*.json")):
        results = load(file)
        if add(results):
            save(results, file)
