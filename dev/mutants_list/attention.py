"""Mutants of attention without masks, by torch's kernel for documents."""

from mutants_list.mutant import Mutant

TORCH = ("attention/test_torch_varlen.py",)

MUTANTS = (
    Mutant(
        "torch's kernel: a window is one token wider",
        "torch_varlen",
        "else sliding_window - 1",
        "else sliding_window",
        TORCH,
    ),
    Mutant(
        "torch's kernel: scores are scaled by the padded width",
        "torch_varlen",
        "q.shape[3] ** -0.5 if scaling is None",
        "wide ** -0.5 if scaling is None",
        TORCH,
    ),
    Mutant(
        "torch's kernel: the backward is given sums without sinks",
        "_TorchVarlen.forward",
        "node.save_for_backward(q, k, v, sinks, out, sums)",
        "node.save_for_backward(q, k, v, sinks, out, sums if sinks is None else own)",
        TORCH,
    ),
    Mutant(
        "torch's kernel: queries whose heads come first",
        "_as_read",
        "first >= second and",
        "",
        TORCH,
    ),
    Mutant(
        "torch's kernel: the room between documents does not count",
        "torch_varlen",
        "max_length_q + _APART * (len(cu_seq_lens_q) - 2)",
        "max_length_q",
        TORCH,
    ),
)
