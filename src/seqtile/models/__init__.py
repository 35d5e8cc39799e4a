"""Hugging Face's models: `apply_seqtile` and `restore` in apply.py, `status` in status.py; the rest computes."""
