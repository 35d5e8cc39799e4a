"""Differentiable operations on plain tensors, computed tile by tile along the tokens."""
