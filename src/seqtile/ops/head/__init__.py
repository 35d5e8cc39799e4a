"""Losses and log-probabilities of a head over a vocabulary, without its logits."""
