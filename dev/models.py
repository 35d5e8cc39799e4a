"""Proves every model type of the transformers that is installed, and writes what follows from that.

    PYTHONPATH=test python -m dev.models [TYPE ...]     with TYPE: only tells

src/seqtile/proof/proven.json names the files that hold what was proven, and by which configs: the default ones and
those of test/support/real_configs.py. With the transformers of dev/constraints.txt the table in docs/models.md is
written too.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from seqtile.models.model_types import model_classes, model_types
from seqtile.models.parts import EXPERTS, LAYER, LOSS, MLP, Part
from seqtile.proof import proven
from seqtile.proof.findings import Finding
from seqtile.proof.small import config_of_all_kinds
from support.real_configs import REAL_CONFIGS
from support.type_table import config_of, found_in, row, sharing_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
CONSTRAINTS = (ROOT / "dev" / "constraints.txt").read_text()


def table(results: dict[str, list[Finding] | str], shared: dict[str, str]) -> str:
    """Returns the block of docs/models.md: the counts, the table, and the types that could not be tried out. `shared`
    is what `sharing_of` says of each type."""
    built = {model_type: found for model_type, found in results.items() if not isinstance(found, str)}

    def count(part: Part) -> int:
        return sum(any(one.part is part and not one.refusal for one in found) for found in built.values())

    both = sum(any(one.part in (MLP, EXPERTS) and not one.refusal for one in found) for found in built.values())
    groups = sum(any(one.groups for one in found) for found in built.values())
    release = transformers.__version__
    lines = [
        f"Of {len(results)} types in transformers {release}, {len(built)} can be built small and run on text. "
        f"Tiled equals untiled for the loss of {count(LOSS)}, the MLPs or experts of {both}, the whole layers of "
        f"{count(LAYER)}, and of {groups} by groups of heads. Prefixes that rows share are computed once by "
        f"{sum(one == 'yes' for one in shared.values())}.",
        "",
        "| model type | loss | MLP | experts | whole layers | head groups | shared prefixes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(row(model_type, found, shared[model_type]) for model_type, found in built.items()),
        "",
        "Not tried out, since their default config cannot be built, or their model wants images or more: "
        + ", ".join(f"`{model_type}`" for model_type, found in results.items() if isinstance(found, str))
        + ".",
    ]
    return "\n".join(lines)


def remember(proofs: list[tuple[str, list[Finding]]]) -> None:
    """Writes the files of classes of which no part differs, and of which configs, to proven.json."""
    same: set[tuple[str, str]] = set()
    different: set[tuple[str, str]] = set()
    for digest, found in proofs:
        for one in found:
            (different if one.refusal else same).add((proven.fingerprint(one.cls.__module__), digest))
    files: dict[str, str] = {}
    for file, digest in sorted(same - different):
        files[file] = f"{files[file]} {digest}" if file in files else digest
    known = json.loads(proven.PROVEN.read_text()) if proven.PROVEN.exists() else {}
    known[transformers.__version__] = files
    proven.PROVEN.write_text(json.dumps(known, indent=1) + "\n")


def write_page(block: str) -> None:
    text = PAGE.read_text()
    before, rest = text.split("<!-- types -->\n")
    PAGE.write_text(f"{before}<!-- types -->\n{block}\n<!-- end of types -->{rest.split('<!-- end of types -->')[1]}")


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # what is small is slower on many
    results: dict[str, list[Finding] | str] = {}
    shared: dict[str, str] = {}
    proofs: list[tuple[str, list[Finding]]] = []
    configs: list[tuple[str, dict[str, Any]]] = [(model_type, {}) for model_type in sys.argv[1:] or model_types()]
    configs += [] if sys.argv[1:] else [(model_type, said) for _, model_type, said in REAL_CONFIGS]
    for model_type, said in configs:
        found = found_in(model_type, said)
        results.setdefault(model_type, found)
        if isinstance(found, str):
            print(f"{model_type}: {found}", flush=True)
            continue
        if model_type not in shared:
            shared[model_type] = sharing_of(model_type)
        print(row(model_type, found, shared[model_type]), flush=True)
        model_class = model_classes(model_type)[0]
        proofs.append((proven.digest(config_of_all_kinds(model_class, config_of(model_type, said))), found))
        for one in found:
            if one.refusal:
                print(f"    {one.cls.__name__}: {one.refusal}", flush=True)
    if sys.argv[1:]:
        return
    remember(proofs)
    if f"transformers=={transformers.__version__}" in CONSTRAINTS:
        write_page(table(results, shared))


if __name__ == "__main__":
    main()
