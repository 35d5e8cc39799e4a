"""Runs test files of other projects with seqtile in the place of what they test, and prints a table in Markdown.

    .venv/bin/python dev/peers_tests.py --files DIR [--source SRC] [--json FILE] [SUITE ...]

`dev/peers_tests.md` says where the files come from (none of them is part of this project) and holds the last table.
Needs no GPU; what needs one is left out and counted as not run. SUITE, a part of a name, chooses some.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Suite:
    """Test files of one project, run in one process."""

    name: str
    shim: str
    """The module of `peers_shims` that stands in."""
    folder: str
    """In the folder of files: a pattern."""
    files: tuple[str, ...]
    """In `folder`; "shim" for the tests in `peers_shims` that are built on the project's classes of tests."""
    mode: str = ""
    select: str = ""
    """Passed to pytest's -k."""
    on_cpu: bool = False
    """Whether the device is written into the files: a copy of them, thrown away afterwards, says "cpu" there."""
    seconds: float = 1500
    note: str = ""
    """What was changed or chosen, for the table."""


LIGER = "[Ll]iger[_-][Kk]ernel*"
FILES = "test/transformers/test_{}.py"
SMALL = "sizes beyond 256 x 1,000 cut down to that"
CUT = "sizes beyond 256 x 2,000 cut down to that"
SHORT = "two layers, 1,000 words, four steps of 2 x 128 tokens"
TRAINED = (
    "mini_llama3 or mini_qwen2- or mini_qwen3- or mini_qwen3_moe or mini_gemma3_text or mini_gemma2 or mini_olmo2 or "
    "mini_glm4- or mini_phi3 or mini_mistral or mini_granite3 or mini_smollm3"
)
ONE_PADDING = "not (sdpa_inference and (fp16 or bf16 or right or no_attn))"
IN_LAYERS = "mini_llama3 or mini_qwen2- or mini_qwen3- or mini_mistral or mini_granite3 or mini_smollm3"
SUITES = [
    Suite(
        "Liger: fused linear cross-entropy", "liger", LIGER, (FILES.format("fused_linear_cross_entropy"),), note=SMALL
    ),
    Suite("Liger: cross-entropy", "liger", LIGER, (FILES.format("cross_entropy"),), note=f"the row kernel; {SMALL}"),
    Suite("Liger: tiled MLP", "liger", LIGER, (FILES.format("tiled_mlp"),)),
    Suite("Liger: SwiGLU", "liger", LIGER, (FILES.format("swiglu"),)),
    *(
        Suite(
            f"Liger: convergence, {mode}",
            "liger",
            LIGER,
            ("test/convergence/fp32/test_mini_models.py",),
            mode,
            TRAINED if mode == "mlp" else IN_LAYERS,
            note=SHORT,
        )
        for mode in ("mlp", "layer", "groups")
    ),
    Suite("DeepSpeed: tiled compute", "deepspeed", "DeepSpeed*", ("tests/unit/ulysses_alst/test_tiled_compute.py",)),
    Suite("DeepSpeed: tiled loss", "deepspeed", "DeepSpeed*", ("tests/unit/ulysses_alst/test_tiled_loss.py",)),
    Suite("DeepSpeed: Ulysses", "deepspeed", "DeepSpeed*", ("tests/unit/ulysses_alst/test_ulysses_sp_hf.py",)),
    Suite(
        "Apple: cut cross-entropy",
        "cut_cross_entropy",
        "*cross[_-]entropy*",
        ("tests/test_cce_loss_forward.py", "tests/test_cce_loss_backward.py", "tests/test_cce_lse.py"),
        on_cpu=True,
    ),
    Suite(
        "QuACK: linear cross-entropy", "quack", "quack*", ("tests/test_linear_cross_entropy.py",), on_cpu=True, note=CUT
    ),
    *(
        Suite(
            f"Hugging Face: models, {mode}", "hugging_face", "transformers*", ("shim",), mode, ONE_PADDING, seconds=2400
        )
        for mode in ("mlp", "layer", "groups")
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", type=Path, required=True, help="where the other projects' files lie")
    parser.add_argument("--source", type=Path, default=HERE.parent / "src", help="the seqtile that is tested")
    parser.add_argument("--json", type=Path, help="where the outcome of every test goes")
    parser.add_argument(
        "--before", type=Path, help="the --json of an earlier run: names what passed then and does not now"
    )
    parser.add_argument("suites", nargs="*", help="parts of the names of the suites that are run; all of them if none")
    options = parser.parse_args()
    outcomes = {}
    for suite in SUITES:
        if options.suites and not any(part.lower() in suite.name.lower() for part in options.suites):
            continue
        begin = time.monotonic()
        outcomes[suite.name] = run(suite, options.files.resolve(), options.source.resolve())
        failed = [test for test in outcomes[suite.name] if test["outcome"] == "failed" and test["test"]]
        if failed and "shim" in suite.files:
            plain = replace(suite, mode="untiled")
            for test in run(plain, options.files.resolve(), options.source.resolve(), failed):
                mark_untiled(outcomes[suite.name], test)
        counts = Counter(test["outcome"] for test in outcomes[suite.name])
        print(f"{suite.name}: {dict(counts)} in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(outcomes, indent=1))
    print("\n".join(table(outcomes)))
    if options.before:
        lost = [
            test
            for name, tests in passed(json.loads(options.before.read_text())).items()
            if name in outcomes
            for test in sorted(tests - passed(outcomes)[name])
        ]
        print("", f"passed before and not now: {len(lost)}", *lost, sep="\n")


def passed(outcomes: dict[str, list[dict]]) -> dict[str, set[str]]:
    return {name: {t["test"] for t in tests if t["outcome"] == "passed"} for name, tests in outcomes.items()}


def run(suite: Suite, files: Path, source: Path, chosen: list[dict] | None = None) -> list[dict]:
    """A dictionary for each test, or each chosen one: its id, its outcome, what it said, and why if that is known."""
    folders = sorted(files.glob(suite.folder))
    paths = [folder / file for folder in folders[:1] for file in suite.files if file != "shim"]
    missing = [path.name for path in paths if not path.exists()]
    if missing or not folders:
        wanted = ", ".join(missing) or suite.folder
        return [{"test": "", "outcome": "not run", "message": f"{wanted} not among the files", "why": None}]
    with tempfile.TemporaryDirectory() as scratch:
        if suite.on_cpu:
            paths = [on_cpu(path, Path(scratch)) for path in paths]
        if "shim" in suite.files:
            paths.append(HERE / "peers_shims" / f"{suite.shim}_models.py")
        tests = [str(path) for path in paths]
        if chosen is not None:
            tests = sorted({f"{paths[0]}::{test['test'].partition('::')[2]}" for test in chosen})
        report = Path(scratch, "report")
        done = subprocess.run(
            [*command(suite, Path(scratch) if suite.on_cpu else folders[0], report), *tests],
            cwd=folders[0],
            env=os.environ | environment(source, files, folders[0]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = report.read_text().splitlines() if report.exists() else []
    found = merged(json.loads(line) for line in lines)
    if done.returncode not in (0, 1) or not found:
        print(done.stdout[-3000:], file=sys.stderr)
        found.append({"test": "", "outcome": "failed", "message": "pytest did not end well", "why": None})
    return found


def command(suite: Suite, root: Path, report: Path) -> list[str]:
    given = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "peers_shims.plugin", f"--rootdir={root}"]
    given += ["-c", str(HERE / "peers_shims" / "pytest.ini"), f"--peer={suite.shim}", f"--peer-mode={suite.mode}"]
    given += [f"--peer-report={report}", f"--peer-seconds={suite.seconds}", "-k", suite.select]
    return [sys.executable, "-m", "pytest", *given]


def merged(lines: Iterable[dict]) -> list[dict]:
    """One for each test: of several, such as those of its parts, one that failed."""
    tests: dict[str, dict] = {}
    for line in lines:
        if tests.get(line["test"], {}).get("outcome") != "failed":
            tests[line["test"]] = line
    return list(tests.values())


def mark_untiled(tests: list[dict], untiled: dict) -> None:
    for test in tests:
        if test["test"] == untiled["test"] and test["outcome"] == untiled["outcome"] == "failed":
            test["why"] = "fails without seqtile, too"


def environment(source: Path, files: Path, folder: Path) -> dict[str, str]:
    paths = (source, HERE, folder, files / "site")  # `site`: packages that only the other projects' tests need
    return {
        "PYTHONPATH": ":".join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(files / "extensions"),  # what a run compiles, and its locks, are no one else's
    }


def on_cpu(path: Path, folder: Path) -> Path:
    """A copy of a file of tests that writes its device into every line."""
    text = path.read_text().replace('"cuda"', '"cpu"').replace("not torch.cuda.is_available()", "False")
    copy = folder / path.name
    copy.write_text(text)
    return copy


def table(outcomes: dict[str, list[dict]]) -> Iterator[str]:
    yield "| suite | passed | failed | skipped | not run | why |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    notes = {suite.name: suite.note for suite in SUITES}
    for name, tests in outcomes.items():
        counts = Counter(test["outcome"] for test in tests)
        why = [notes[name]] if notes[name] else []
        for outcome in ("failed", "not run"):
            reasons = Counter(test["why"] or test["message"][:150] for test in tests if test["outcome"] == outcome)
            why += [f"{outcome}, {count}: {text}" for text, count in reasons.most_common()]
        numbers = " | ".join(str(counts[outcome]) for outcome in ("passed", "failed", "skipped", "not run"))
        yield f"| {name} | {numbers} | {'; '.join(why).replace('|', '/')} |"


if __name__ == "__main__":
    main()
