"""The orders in which Liger and seqtile can be applied, and the package that then computes each part of a model.

python -m models.liger_orders, in test/, prints their table in docs/compatibility.md.
"""

SEQTILE, LIGER, HF = "seqtile", "liger_kernel", "transformers"
TOOK = "liger_kernel took it back"
# "build" builds a model; "liger" or "seqtile" patch the classes; "liger model" or "seqtile model" patch that model,
# where Liger also replaces the MLP and norm classes. Then: the packages that compute the loss, MLPs and norms of that
# model and of a model built at the end, and what status says of a part that seqtile was applied to and does not run.
ORDERS = {
    "liger, seqtile, build": [(SEQTILE, SEQTILE, LIGER), (SEQTILE, SEQTILE, LIGER), None],
    "seqtile, liger, seqtile, build": [(SEQTILE, SEQTILE, LIGER), (SEQTILE, SEQTILE, LIGER), None],
    "liger, build, seqtile": [(SEQTILE, LIGER, LIGER), (SEQTILE, SEQTILE, LIGER), LIGER],
    "liger, build, seqtile model": [(SEQTILE, SEQTILE, LIGER), (LIGER, LIGER, LIGER), None],
    "build, liger model, seqtile": [(LIGER, LIGER, LIGER), (SEQTILE, SEQTILE, LIGER), LIGER],
    "build, liger model, seqtile model": [(SEQTILE, SEQTILE, LIGER), (HF, LIGER, LIGER), None],
    "seqtile, build, liger": [(LIGER, SEQTILE, HF), (LIGER, LIGER, LIGER), TOOK],
    "seqtile, build, liger model": [(LIGER, LIGER, LIGER), (SEQTILE, LIGER, LIGER), TOOK],
    "build, seqtile model, liger": [(SEQTILE, SEQTILE, HF), (LIGER, LIGER, LIGER), None],
    "build, seqtile model, liger model": [(LIGER, LIGER, LIGER), (HF, LIGER, LIGER), TOOK],
}

_WORDS = {
    "liger": "Liger on the classes",
    "seqtile": "seqtile on the classes",
    "liger model": "Liger on the model",
    "seqtile model": "`apply_seqtile(model)`",
}
_NAMES = {SEQTILE: "seqtile", LIGER: "Liger", HF: "Hugging Face"}


def table() -> str:
    """Returns the orders as in docs/compatibility.md, starting with those in which loss and MLPs are tiled."""
    rows = ["| order | loss | MLP | norms |", "| --- | --- | --- | --- |"]
    for order, (ran, _, _) in sorted(ORDERS.items(), key=lambda item: item[1][0][:2] != (SEQTILE, SEQTILE)):
        *parts, norms = (_NAMES[package] for package in ran)
        cells = [part if part == "seqtile" else f"**{part}**" for part in parts]
        words = ", ".join(_WORDS.get(operation, operation) for operation in order.split(", "))
        rows.append(f"| {' | '.join([words, *cells, norms])} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
