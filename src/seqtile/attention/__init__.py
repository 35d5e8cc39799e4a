"""Attention without masks of length x length: documents, padding, windows, spans, for any attention of Hugging Face."""
