"""Differentiable operations on plain tensors, computed chunk by chunk along the tokens."""
