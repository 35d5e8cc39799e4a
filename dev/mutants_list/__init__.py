"""The list of mutants, by package of seqtile."""

from mutants_list import (
    attention,
    kernels,
    memory,
    models,
    offload,
    ops,
    ops_layer,
    probe,
    recipes,
    recurrences,
    shared_prefixes,
    sp,
    trainers,
    whole_batches,
)
from mutants_list.mutant import Mutant

MODULES = (
    attention,
    kernels,
    ops,
    ops_layer,
    models,
    sp,
    offload,
    memory,
    trainers,
    recurrences,
    whole_batches,
    shared_prefixes,
    probe,
    recipes,
)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for module in MODULES for mutant in module.MUTANTS)

__all__ = ["MUTANTS", "Mutant"]
