from seqtile.ops.linear import WeightGrad, main_grad_of, scale_  # noqa: F401
