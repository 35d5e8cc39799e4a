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
    Mutant(
        "attention without masks: documents of a row are not told apart",
        "_layout_of",
        "places + 2 * told",
        "places + 0 * told",
        ("attention/test_varlen.py",),
        select="equals_masks and llama and documents",
    ),
    Mutant(
        "attention without masks: chunks are not cut",
        "_in_chunks",
        "if (size := recipe.chunk) is None:",
        "if (size := recipe.chunk) or True:",
        ("attention/test_varlen.py",),
        select="equals_masks and llama4",
    ),
    Mutant(
        "attention without masks: chunks are counted from a document's first token",
        "_in_chunks",
        "positions[i][start]",
        "start",
        ("attention/test_varlen.py",),
        select="compose",
    ),
    Mutant(
        "attention without masks: a mask with holes is taken for one without",
        "_layout_of",
        "any(len(row) > 1 for row in documents)",
        "any(len(row) > 2 for row in documents)",
        ("attention/test_varlen.py",),
        select="compose",
    ),
    Mutant(
        "attention without masks: the untiled model of the first step has it, too",
        "former_attention",
        "if not is_varlen(model):",
        "if is_varlen(model):",
        ("attention/test_varlen.py",),
        select="first_step",
    ),
    Mutant(
        "attention without masks: widths are padded, and scores scaled by the wider",
        "_in_one_width",
        "heads[0].shape[3] ** -0.5",
        "width ** -0.5",
        ("attention/test_varlen.py",),
        select="one_width",
    ),
    Mutant(
        "attention without masks: an attention chosen after the first forward is replaced",
        "choose_varlen_by_class",
        "if model in chosen:",
        "if False:",
        ("attention/test_varlen.py",),
        select="by_the_classes",
    ),
    Mutant(
        "attention without masks: a model that reads its masks is not refused",
        "attention_refusal",
        "is None:\n        return None\n    return",
        "is not None:\n        return None\n    return",
        ("attention/test_varlen.py",),
        select="refused_by_name",
    ),
)
