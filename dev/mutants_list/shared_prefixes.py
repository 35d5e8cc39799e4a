"""Mutants of prefixes that rows share and that are computed once."""

from functools import partial

from mutants_list.mutant import Mutant

Shared = partial(Mutant, tests=("sp/test_prefixes.py",))
Attention = partial(Mutant, tests=("sp/test_documents.py",))

MUTANTS = (
    Shared(
        "prefixes: short prefixes are shared",
        "_Growing.grow",
        "self.common[head][row] >= depth + self.min_tokens",
        "self.common[head][row] > depth",
        select="too_short",
    ),
    Shared(
        "prefixes: positions are not compared",
        "prefix_tree",
        "keys = [key for name, value in of_tokens.items() for key in _keys(name, value, rows)]",
        "keys = [key for name, value in of_tokens.items() for key in _keys(name, value, rows)][:1]",
        select="what_is_told",
    ),
    Shared(
        "prefixes: a hole in a mask is not seen",
        "_compared",
        "has_hole = ((tokens > 0) & (length - valid.flip(1).int().argmax(1) - first != tokens)).any()",
        "has_hole = (tokens < 0).any()",
        select="why_there",
    ),
    Attention(
        "prefixes: a query sees its parent's keys and no others before",
        "family",
        "(*before[parent], documents[parent])",
        "(documents[parent],)",
        select="dense_mask",
    ),
    Attention(
        "prefixes: a window that is one too short",
        "_within_reach",
        "keys[-1][1] - q0 + reach - 1, []",
        "keys[-1][1] - q0 + reach - 2, []",
        select="dense_mask or attention",
    ),
    Attention(
        "prefixes: causality from the first key",
        "Block.mask",
        "first = len(keys) - (self.keys[-1][1] - self.q0) if self.keys else 0",
        "first = 0",
        select="dense_mask",
    ),
    Shared(
        "prefixes: of tokens that share a row one gradient is kept",
        "Owners.summed",
        "total.index_add_(0, index, gradients.to(dtype))",
        "total.index_copy_(0, index, gradients.to(dtype))",
        select="values or a_step",
    ),
    Shared(
        "prefixes: gradients of shared keys are added in their dtype",
        "_Calls.backward",
        "dtype=torch.promote_types(x.dtype, torch.float32)",
        "dtype=x.dtype",
        select="float32",
    ),
    Shared(
        "prefixes: a recurrence begins a completion with nothing",
        "_one_by_one",
        "out, after = compute(operands, states,",
        "out, after = compute(operands, (),",
        select="families",
    ),
    Shared(
        "prefixes: a convolution begins a completion with nothing",
        "_one_by_one",
        "tail, states = ([], []) if parent is None else ends[parent]",
        "tail, states = [], [] if parent is None else ends[parent][1]",
        select="families",
    ),
    Shared(
        "prefixes: rows that want a gradient each are shared",
        "WholeBatches._tree",
        "elif sharding.forward.has_gradient or (",
        "elif (",
        select="want_a_gradient",
    ),
    Shared(
        "prefixes: what a checkpoint computes again finds another attention",
        "WholeBatches.end",
        "Forward(self.sharding.at_rest,",
        "Forward(self.sharding.implementation,",
        select="a_step or forwards",
    ),
    Shared(
        "prefixes: hidden states of all tokens are copied for a loss",
        "_of_counted",
        "counted is None or not hidden.owners.is_shared",
        "True",
        select="labelled",
    ),
)
