"""nn.Modules over the ops, for models that are not Hugging Face's: options once, tensors at every call.

They hold no weight: the head's is passed at every call, so that it may be tied to an embedding, or belong to a module
that something else shards.
"""

from seqtile.modules.loss import LinearCrossEntropyLoss, LinearLogProbs

__all__ = ["LinearCrossEntropyLoss", "LinearLogProbs"]
