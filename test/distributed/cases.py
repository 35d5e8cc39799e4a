"""The cases trained on two processes: every architecture under every data parallelism. Each case has an adapter, a kind
of checkpointing and an order of Liger, so that every two values meet at least once. Also variants of the parallelisms.

python -m distributed.cases, in test/, prints their table in docs/compatibility.md.
"""

from collections.abc import Iterator
from typing import NamedTuple

from seqtile.arch import ARCHS
from support.choice import covering

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
ADAPTERS = ("full", "lora", "generic")
CHECKPOINTING = ("plain", "ckpt", "reentrant")
LAYER = ("segments", "groups")
LIGER = ("none", "class", "model", "again")
FAMILIES = ("gpt_oss", "qwen3_5_moe_text", "qwen3_next", "deepseek_v3", "glm4_moe", "seed_oss")
FAMILIES += ("qwen3_5_text", "gemma4_text", "gemma4_unified_text", "qwen3_vl", "ministral3", "olmo3")
"""Model types without an entry in the table."""
VARIANTS = ("fsdp2_group", "fsdp2_head", "fsdp2_mlp", "fsdp2_projection", "fsdp2_keep", "fsdp2_mixed", "zero2_offload")
VARIANTS += ("zero3_leaf", "zero3_offload", "zero3_evaluated")


class Case(NamedTuple):
    arch: str
    strategy: str
    adapter: str
    """full: all parameters; lora: PEFT's, over a frozen base, whose weights are read directly; generic: an activation
    that gated_mlp does not support, so that the MLP is called chunk by chunk."""
    checkpointing: str
    liger: str
    """class: Liger and then seqtile on the classes; model: the same on the model; again: seqtile on the model, then
    Liger, which removes it, then seqtile."""

    layer: str = "none"
    """segments: the whole layer is tiled; groups: also attention in head chunks; lora is on every projection."""

    def __str__(self) -> str:
        return "-".join(self)


def pool_of(strategy: str, count: int = 2) -> int | tuple[int, str]:
    """Returns the pool of ranks that runs a data parallelism, see pool.py.

    ZeRO-3 has its own: it permanently replaces torch.nn.functional.linear, and thereby the order in which gradients of
    a weight and its bias arrive, which ZeRO-2's buckets follow.
    """
    return (count, "zero3" if "zero3" in strategy else "zero") if "zero" in strategy else count


def excluded(a: str, b: str) -> str | None:
    """Returns why two values never meet; None if they must."""
    if any(name in ARCHS and not ARCHS[name].liger for name in (a, b)) and {a, b} & set(LIGER[1:]):
        return "Liger does not know it"
    return None


def matrix() -> list[Case]:
    found = []
    for i, arch in enumerate(ARCHS):
        for j, strategy in enumerate(STRATEGIES):
            adapter, order = ADAPTERS[(i + j) % 3], (*LIGER, "none")[(i + j) % 5]
            if excluded(arch, order):
                order = "none"
            found.append(Case(arch, strategy, adapter, CHECKPOINTING[(i // 3 + j) % 3], order))
    return found


def variants() -> list[Case]:
    found = [Case("llama", name, ADAPTERS[i % 2], CHECKPOINTING[i % 2], "none") for i, name in enumerate(VARIANTS)]
    found.append(Case("llama", "zero3_attentions", "full", "plain", "none", "segments"))
    found.append(Case("llama", "fsdp2_mlp", "full", "ckpt", "none", "groups"))
    return [*found, Case("mixtral", "expert_parallel", "full", "ckpt", "none")]


def layers() -> list[Case]:
    """Every parallelism with tiled layers, in both ways, for every architecture that allows it."""
    archs = [name for name, arch in ARCHS.items() if arch.layer]
    found = []
    for i, strategy in enumerate(STRATEGIES):
        for j, layer in enumerate(LAYER):
            adapter, checkpointing = ("full", "lora")[(i + j) % 2], CHECKPOINTING[(i + 2 * j) % 3]
            found.append(Case(archs[(2 * i + j) % len(archs)], strategy, adapter, checkpointing, "none", layer))
    return found


def families() -> list[Case]:
    """The families of test_families.py under the parallelisms that shard weights."""
    found = [Case(name, "fsdp2", "full", "ckpt", "none", "segments") for name in FAMILIES]
    return found + [Case(name, "zero3", "full", "plain", "none", "segments") for name in FAMILIES]


RARE = ("fsdp2_group", "fsdp2_keep", "fsdp2_mixed", "fsdp2_projection", "zero2_offload", "zero3_leaf", "zero3_offload")
"""Variants of a parallelism that do not run every day."""


def cases() -> Iterator[tuple[Case, bool]]:
    """Yields all cases, and whether each runs every day. Of the matrix without Liger the fewest cases with every
    parallelism (ZeRO-3 is among the variants), adapter and checkpointing; in Triton's interpreter Liger on the classes,
    and in both orders on the model. Of whole layers one way per parallelism but ZeRO-1 and ZeRO-3; of the families one
    case under each parallelism, ZeRO-3 with whole layers."""
    found = sorted(matrix(), key=lambda case: case.liger != "none")
    plain = [case for case in found if case.liger == "none"]
    every_day = covering([{case.strategy, case.adapter, case.checkpointing} - {"zero3"} for case in plain])
    with_liger = covering([{case.liger} & {"class", "again"} for case in found])
    yield from ((case, i in every_day or i in with_liger) for i, case in enumerate(found))
    yield from ((case, case.strategy not in RARE) for case in variants())
    yield from ((case, i % 4 in (0, 3) and case.strategy not in ("zero1", "zero3")) for i, case in enumerate(layers()))
    yield from ((case, i % 18 == 0) for i, case in enumerate(families()))


def table() -> str:
    """Returns the matrix as it is in docs/compatibility.md."""
    rows = [["", *STRATEGIES], ["---"] * (1 + len(STRATEGIES))]
    for arch in ARCHS:
        cases = [case for case in matrix() if case.arch == arch]
        rows.append([arch, *(" ".join(case[2:5]) for case in cases)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())
