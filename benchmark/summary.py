"""Prints results, a line for each row, also those of a run that was killed.

python3 -m benchmark.summary DIRECTORY
"""

import json
import sys
from pathlib import Path

from benchmark import rows
from benchmark.results import Results, Row, SubjectResults, load
from benchmark.terminal import figure, longest


def found_in(directory: Path) -> list[Results]:
    """Of each file; rows of a subject, or of a method, that has not ended stand by themselves."""
    found = [load(file) for file in sorted(directory.glob("*.json"))]
    for file in sorted(directory.glob("*.jsonl")):
        subject = rows.subject_of(file)
        machine, _ = rows.read(file)
        for name in {row["subject"] for row in subject.rows}:
            device = machine.get("device", "?")
            found.append(Results(device, "not ended", file.stem, subjects={name: subject}))
    for file in sorted(directory.glob("*.unfinished")):
        row = json.loads(file.read_text()) | {"subject": "model_step", "contestant": file.stem.partition("-")[2]}
        found.append(
            Results("?", "not ended", file.stem, subjects={"model_step": SubjectResults(None, 0, None, None, [row])})
        )
    return found


def line_of(row: Row) -> str:
    if "what" in row:
        return line_of_check(row)
    about = f"{row['subject']:22}{row.get('shape', ''):14}{row.get('tokens', 0):>9,}  {row['contestant']:36}"
    if row.get("steps"):
        last = row["steps"][-1]
        rate = f"{last['tokens_per_second']:,.0f} tokens/s, {last['utilisation']:.0%}"
        return f"{about}longest {longest(row)}, predicted {figure(row.get('predicted'), ',') or '-'}, {rate}"
    if "both_ms" not in row:
        return f"{about}{row['status']}: {row.get('why', '').partition(chr(10))[0][:60]}".removesuffix(": ")
    times = f"{row['both_ms']:10,.2f} ms +- {row.get('both_iqr_ms', 0):.2f}"
    ratios = [f"x{name} {row[f'time_x_{name}']:.2f}" for name in ("floor", "hf", "liger") if f"time_x_{name}" in row]
    ratios += [f"predicted {row['predicted_ms']:,.2f} ms"] if "predicted_ms" in row else []
    return f"{about}{times}  {'  '.join(ratios)}  {row.get('peak_bytes', 0) / 2**30:.2f} GiB"


def line_of_check(row: Row) -> str:
    if "error" in row:
        errors = f"{float(row['error']):.1e}, allowed {float(row['allowed']):.1e}"
        return f"{'right' if row['right'] else 'WRONG'}  {row['what']}: {errors}"
    said = (f"{key} {value}" for key, value in row.items() if key != "what" and not isinstance(value, list))
    return f"{row['what']}: {', '.join(said)}"


def main() -> None:
    for results in found_in(Path(sys.argv[1])):
        print(f"{results.device}, {results.date}, {results.size}")
        for name, subject in results.subjects.items():
            judged = [row["right"] for row in subject.rows if "right" in row]
            rate = f"{figure(subject.matmul_tflops, ',.0f')} TFLOP/s, {subject.seconds:.0f} s"
            print(f"{name}: {f'{sum(judged)} of {len(judged)} right' if judged else rate}")
            for row in results.rows(name):
                if row.get("right") is not True:  # its step has said so
                    print(line_of(row))


if __name__ == "__main__":
    main()
