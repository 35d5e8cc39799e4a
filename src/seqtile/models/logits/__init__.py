"""`outputs.logits` of a tiled loss: a description, and a tensor that is computed when it is read."""
