"""nn.Modules over the ops, for models that are not Hugging Face's."""

from seqtile.modules.loss import LinearCrossEntropyLoss, LinearLogProbs

__all__ = ["LinearCrossEntropyLoss", "LinearLogProbs"]
