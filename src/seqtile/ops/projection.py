from seqtile.ops.linear import LowRank, Projection  # noqa: F401
