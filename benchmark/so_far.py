"""What has been measured on a GPU so far, in words: README's paragraph, and what checks found, on the page of
benchmarks."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from benchmark import readme_picture
from benchmark.gpu_day import CHECKS, newest_of
from benchmark.markdown import table
from benchmark.results import RESULTS, Results, Row

GIB = 2**30
OTHERS = ("cuDNN by itself",)
"""Checks of what seqtile works around, which do not count as its own."""
NOTHING = (
    "**Nothing has run on a GPU yet**: kernels are compiled for GPUs and run in Triton's interpreter; CPU tests check "
    "the numbers."
)


def checks_of(directory: Path, parts: Sequence[str] = CHECKS) -> list[tuple[Results, str, list[Row]]]:
    """Of each of these parts that has been checked on a GPU: the newest results, its name and its rows."""
    found = [(newest_of(part, directory), part) for part in parts]
    return [(results, part, results.subjects[part].rows) for results, part in found if results]


def sentences(directory: Path = RESULTS) -> str:
    """Returns README's paragraph."""
    found, speed, (lengths, _) = checks_of(directory), of_time(directory), readme_picture.measured(directory)
    where = {f" ({results.device}, {results.date})" for results, *_ in found}
    speed = speed.replace(*where, "") if len(where) == 1 else speed  # that is said already
    said = [of_checks(found)] if found else [] if speed or lengths else [NOTHING]
    said += [speed] if speed else []
    left = ["times"] * (not speed) + ["lengths and memory"] * (not lengths)
    said += [f"GPU {', '.join(left)} below are predicted."] if left else []
    return fill(" ".join(said), 130)


def of_checks(found: list[tuple[Results, str, list[Row]]]) -> str:
    """What came of all checks, and the peak of the few steps."""
    commits = dict.fromkeys(str(results.subjects[part].commit) for results, part, _ in found)
    results = found[0][0]
    rows = [row for _, _, rows in found for row in rows]
    judged = [row for row in rows if "right" in row]
    wrong = sum(not row["right"] for row in judged)
    where = f"**On an {results.device}** ({results.date}, commit {' and '.join(commits)})"
    link = "[checks](docs/benchmarks.md)"
    verdict = f"**{wrong} of {len(judged)} {link} are wrong**" if wrong else f"all {len(judged)} {link} are right"
    plan = next((row for row in rows if row["what"] == "plan"), None)
    peak = f"; a step peaked at {plan['of'] / GIB:.1f} GiB, planned {plan['planned_bytes'] / GIB:.1f}" if plan else ""
    return f"{where} {verdict}{peak}."


def of_time(directory: Path) -> str:
    """The time of a layer that is tiled as a whole, over each peer's, at the longest sequence that has one."""
    results = newest_of("decoder_layer", directory)
    rows = [row for row in results.rows("decoder_layer") if row["contestant"] == "seqtile_layer"] if results else []
    peers = {"time_x_hf": "Hugging Face's", "time_x_liger": "Liger's"}
    timed = [row for row in rows if row["shape"] == "llama3_8b" and peers.keys() & row.keys()]
    if not timed:
        return ""
    row = max(timed, key=lambda row: row["tokens"])
    ratios = " and ".join(f"{row[key]:.2f} of {peer}" for key, peer in peers.items() if key in row)
    where = f"{results.device}, {results.date}"
    return f"A tiled layer of {row['tokens'] // 1024}K tokens takes {ratios} time ({where})."


def checks(directory: Path = RESULTS) -> list[str]:
    """Returns paragraphs: what each part found; every wrong check; and what else they say."""
    parts = []
    for results, part, rows in checks_of(directory, (*CHECKS, *OTHERS)):
        judged = [row for row in rows if "right" in row]
        wrong = [row for row in judged if not row["right"]]
        name = part.capitalize() if part in CHECKS else part
        about = f"**{name}**: {len(judged) - len(wrong)} of {len(judged)} checks are right"
        parts.append(f"{about} ({results.device}, {results.date}, commit {results.subjects[part].commit}).")
        lines = [[row["what"], row["error"], f"{float(row['allowed']):.1e}"] for row in wrong if "error" in row]
        lines += [[row["what"], row.get("why", ""), ""] for row in wrong if "error" not in row]
        parts += [table([["wrong", "error", "allowed"], *lines], words=2)] if lines else []
        said = [f"- {words_of(row)}" for row in rows if "right" not in row and set(row) != {"what", "says"}]
        parts += ["\n".join(said)] if said else []
    return parts


def words_of(row: Row) -> str:
    """A row that nothing judges."""
    if row["what"] == "plan":
        return f"peak {row['of'] / GIB:.2f} GiB, planned {row['planned_bytes'] / GIB:.2f}"
    shown = {key: rounded(value) for key, value in row.items() if key not in ("what", "says", "peak_bytes")}
    shown |= {"peak": f"{row['peak_bytes'] / GIB:.2f} GiB"} if "peak_bytes" in row else {}
    return f"{row['what']}: {', '.join(f'{key} {value}' for key, value in shown.items())}"


def rounded(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(rounded, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
