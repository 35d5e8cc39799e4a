"""What is trained on two processes: every architecture under every data parallelism, each with an adapter and a kind of
checkpointing, so that every two of them meet at least once; and the variants of FSDP2."""

from typing import NamedTuple

from seqtile.models.arch import ARCHS

# A process tree runs all of its cases. ZeRO-3 has its own: it replaces torch.nn.functional.linear for good, and with it
# the order in which the gradients of a weight and its bias arrive, which ZeRO-2's buckets follow.
TREES = {"torch": ("ddp", "fsdp2"), "zero": ("zero1", "zero2"), "zero3": ("zero3",)}
ADAPTERS = ("full", "lora", "generic")
CHECKPOINTING = ("plain", "ckpt", "reentrant")
VARIANTS = ("fsdp2_group", "fsdp2_head", "fsdp2_mlp", "fsdp2_keep", "fsdp2_mixed")


class Case(NamedTuple):
    arch: str
    strategy: str
    adapter: str
    """full: all parameters; lora: PEFT's, over a frozen base, read directly; generic: an activation that gated_mlp does
    not know, so that the MLP is called tile by tile."""
    checkpointing: str

    def __str__(self) -> str:
        return "-".join(self)


def cases(tree: str) -> list[Case]:
    strategies = [strategy for names in TREES.values() for strategy in names]
    found = []
    for i, arch in enumerate(ARCHS):
        for j, strategy in enumerate(strategies):
            adapter = ADAPTERS[(i + j) % 3]
            if strategy == "zero3" and adapter == "generic":  # refused, in a test of its own
                adapter = "full"
            if strategy in TREES[tree]:
                found.append(Case(arch, strategy, adapter, CHECKPOINTING[(i // 3 + j) % 3]))
    if tree == "torch":
        found += [Case("llama", variant, ADAPTERS[i % 2], CHECKPOINTING[i % 2]) for i, variant in enumerate(VARIANTS)]
    return found
