"""Tests each type of image model on 1, 2 and 4 ranks. `python -m sp.image_types` in test/ prints the table in
docs/several-gpus.md."""

from sp.images import MODELS, VIDEOS, is_right
from support.pool import Pool

_POSITIONS = "embeddings, positions of three or four axes"
_SPANS = "embeddings, spans of tokens that see each other both ways"
FOLLOWS = dict.fromkeys(("qwen2_5_vl", "qwen3_5", "glm4v"), _POSITIONS)
FOLLOWS |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), f"{_POSITIONS}, DeepStack's features")
FOLLOWS |= dict.fromkeys(("llava", "mistral3", "internvl"), "embeddings")
FOLLOWS |= dict.fromkeys(("gemma3", "paligemma"), _SPANS) | {"gemma4": f"{_SPANS}, inputs of each layer"}
RANKS = (1, 2, 4)


def table() -> str:
    """Runs a step of every type, and returns the table as in docs/several-gpus.md."""
    found: dict[tuple[str, int], tuple[bool, bool]] = {}
    for ranks in RANKS:
        with Pool(ranks) as pool:
            for name in (*MODELS, *VIDEOS):
                found[name, ranks] = pool.run(is_right, name)[0]
    rows = [["model type", "what follows the tokens", *(f"on {n}" for n in RANKS), "videos", "dealt"]]
    rows.append(["---"] * len(rows[0]))
    said = lambda name: ["equal" if found[name, ranks][0] else "differs" for ranks in RANKS]  # noqa: E731
    for name in MODELS:
        videos = ", ".join(sorted({*said(f"{name} videos")})) if f"{name} videos" in VIDEOS else ""
        is_dealt = all(found[name, ranks][1] for ranks in RANKS[1:])
        rows.append([f"`{name}`", FOLLOWS[name], *said(name), videos, "yes" if is_dealt else "no"])
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


if __name__ == "__main__":
    print(table())
