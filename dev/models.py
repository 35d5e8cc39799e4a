"""Proves every model type of the transformers that is installed, and writes what follows from that.

    PYTHONPATH=test python -m dev.models [TYPE ...]     with TYPE: only tells

src/seqtile/proof/proven.json names the files that hold what was proven, and by which configs: the default ones and
those of test/support/real_configs.py; proven_attention.json the files of models whose attention computes the same
without masks. With the transformers of dev/constraints.txt the table in docs/models.md is
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
from seqtile.proof.attention import why_masks_are_needed
from seqtile.proof.findings import Finding
from seqtile.proof.small import config_of_all_kinds, small_model
from support.real_configs import REAL_CONFIGS
from support.type_table import config_of, found_in, row, sharing_of, varlen_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
CONSTRAINTS = (ROOT / "dev" / "constraints.txt").read_text()


def table(results: dict[str, list[Finding] | str], shared: dict[str, str], varlen: dict[str, str]) -> str:
    """Returns the block of docs/models.md: the counts, the table, and the types that could not be tried out. `shared`
    and `varlen` are what `sharing_of` and `varlen_of` say of each type."""
    built = {model_type: found for model_type, found in results.items() if not isinstance(found, str)}

    def count(part: Part) -> int:
        return sum(any(one.part is part and not one.refusal for one in found) for found in built.values())

    both = sum(any(one.part in (MLP, EXPERTS) and not one.refusal for one in found) for found in built.values())
    groups = sum(any(one.groups for one in found) for found in built.values())
    release = transformers.__version__
    lines = [
        f"Of {len(results)} types in transformers {release}, {len(built)} can be built small and run on text. "
        f"Tiled equals untiled for the loss of {count(LOSS)}, the MLPs or experts of {both}, the whole layers of "
        f"{count(LAYER)}, and of {groups} in head chunks. Prefixes that rows share are computed once by "
        f"{sum(shared[one] == 'yes' for one in built)}, and attention without masks by "
        f"{sum(varlen[one] in ('yes', 'with masks') for one in built)}.",
        "",
        "| model type | loss | MLP | experts | whole layers | head chunks | shared prefixes | varlen |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(row(model_type, found, shared[model_type], varlen[model_type]) for model_type, found in built.items()),
        "",
        "Not tried out, since their default config cannot be built, or their model wants images or more: "
        + ", ".join(f"`{model_type}`" for model_type, found in results.items() if isinstance(found, str))
        + ".",
    ]
    return "\n".join(lines)


def remember(table: Path, proofs: list[tuple[str, str, bool]]) -> None:
    """Writes the files of classes that are right, and of which configs, to a table. `proofs`: a Python module, the
    digest of a config, and whether what was tried is right."""
    same: set[tuple[str, str]] = set()
    different: set[tuple[str, str]] = set()
    for home, digest, is_right in proofs:
        (same if is_right else different).add((proven.fingerprint(home), digest))
    files: dict[str, str] = {}
    for file, digest in sorted(same - different):
        files[file] = f"{files[file]} {digest}" if file in files else digest
    known = json.loads(table.read_text()) if table.exists() else {}
    known[transformers.__version__] = files
    table.write_text(json.dumps(known, indent=1) + "\n")


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
    varlen: dict[str, str] = {}
    proofs: list[tuple[str, str, bool]] = []
    proofs_of_attention: list[tuple[str, str, bool]] = []
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
        model = small_model(model_class := model_classes(model_type)[0], config_of(model_type, said))
        varlen.setdefault(model_type, varlen_of(model))
        print(row(model_type, found, shared[model_type], varlen[model_type]), flush=True)
        digest = proven.digest(config_of_all_kinds(model_class, config_of(model_type, said)))
        proofs += [(one.cls.__module__, digest, not one.refusal) for one in found]
        is_right = why_masks_are_needed(model) is None
        proofs_of_attention += [(home, digest, is_right) for home in proven.own_homes(model)]
        for one in found:
            if one.refusal:
                print(f"    {one.cls.__name__}: {one.refusal}", flush=True)
    if sys.argv[1:]:
        return
    remember(proven.PROVEN, proofs)
    remember(proven.PROVEN_ATTENTION, proofs_of_attention)
    if f"transformers=={transformers.__version__}" in CONSTRAINTS:
        write_page(table(results, shared, varlen))


if __name__ == "__main__":
    main()
