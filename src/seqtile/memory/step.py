"""A training step on one GPU as moments: all that is alive at each, by what it is for."""

from dataclasses import dataclass

from seqtile.memory.layer import FLOAT, Parts, chunk_tokens
from seqtile.memory.setup import GIB, OPTIMIZERS, Setup
from seqtile.memory.shape import Shape
from seqtile.memory.tiled_layer import layer_of

PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "inputs",
    "attention",
    "mlp",
    "norms",
    "loss",
    "communication",
    "reserved",
)
"""`inputs`: of the layers, kept for their backward. `norms`: norms, residuals and positions. `communication`: weights
gathered, gradients not yet spread or being reduced. `reserved`: the CUDA context, and NCCL (about 1 GiB each: Arctic
Long Sequence Training, 2.1)."""
BUCKET = 500_000_000  # elements that are reduced at a time: DeepSpeed's default


@dataclass(frozen=True)
class Moment:
    name: str
    parts: Parts

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Progress:
    """How far the backward is, in parameters, and what FSDP2 holds then."""

    done: int = 0
    """Parameters that have their gradients."""
    whole: int = 0
    """Those of them whose gradients are not yet spread over the GPUs."""
    gathered: int = 1
    """Layers whose weights, or gradients on their way, are whole."""
    outer: int = 1
    """How many times the weights outside of the layers are."""
    in_layers: bool = False
    """Whether it is the backward of a layer."""


class Step:
    """Forward and backward of `tokens` on this GPU; ZeRO-3 as FSDP2 does it, layer by layer."""

    def __init__(self, shape: Shape, setup: Setup, tokens: int):
        self.shape, self.setup, self.tokens = shape, setup, tokens
        self.layer = layer_of(shape, setup, tokens)
        self.full = setup.lora_rank is None
        self.trained = shape.parameters if self.full else shape.adapter_parameters(setup.lora_rank)

    def moments(self) -> list[Moment]:
        """In the order of a step. What grows or shrinks from layer to layer does so evenly but at both ends, so the two
        layers at either end stand for all."""
        shape, layers = self.shape, self.shape.layers
        head = shape.head_parameters + shape.hidden
        norm = {"norms": self.tokens * self.layer.final_norm.backward}
        # A group of weights comes in a buffer, out of which it is copied; the buffer before is freed thereafter.
        outer_twice = shape.outer_parameters > shape.layer_parameters
        gathering = Progress(gathered=2, outer=2) if outer_twice else Progress(gathered=3)
        moments = [
            self._moment("forward", {"norms": self.layer.hidden}, 0, gathering),
            self._moment("loss", self._loss(), layers, Progress()),
            self._moment("final norm", norm, layers, Progress(done=head, whole=shape.head_parameters)),
        ]
        for place in sorted({layers, layers - 1, 2, 1} & set(range(1, layers + 1)), reverse=True):
            done = head + (layers - place) * shape.layer_parameters
            gathered = 1 + (place > 1) + (place < layers and self.full)  # this, the next, gradients of the one before
            for name, parts, here in self.layer.moments():
                progress = Progress(done + here, shape.head_parameters + here, gathered, in_layers=True)
                moments.append(self._moment(f"{name}, layer {place} of {layers}", parts, place, progress))
        sum_of_both = 3 if shape.tied else 1
        embedding = shape.head_parameters * self.setup.bytes * sum_of_both if self.full else 0
        parts = {"norms": self.layer.hidden, "gradients": embedding}
        whole = 0 if shape.tied else shape.head_parameters
        moments.append(self._moment("embedding", parts, 0, Progress(shape.parameters - shape.head_parameters, whole)))
        return moments

    def _moment(self, name: str, parts: Parts, waiting: int, progress: Progress) -> Moment:
        """`parts`, while the inputs of the first `waiting` layers wait."""
        positions = 2 * self.tokens * self.shape.head_dim * self.setup.bytes
        everything = dict.fromkeys(PARTS, 0) | self.states()
        others = {
            "inputs": self._inputs(waiting, progress.in_layers),
            "gradients": self._gradients(progress.done),
            "communication": self._communication(progress),
            "norms": positions,
        }
        for more in (parts, others):
            for part, size in more.items():
                everything[part] += size
        return Moment(name, everything)

    # What stays from step to step.

    def states(self) -> Parts:
        """On the GPU."""
        offload = self.setup.offload
        return {
            "weights": 0 if "weights" in offload else self._weights(),
            "optimizer": 0 if "optimizer" in offload else self._optimizer(),
            "reserved": GIB * (2 if self.setup.gpus > 1 else 1),
        }

    def host(self) -> Parts:
        """In the host memory of a node, for all its GPUs."""
        setup = self.setup
        held = {}
        if "activations" in setup.offload:
            held["inputs"] = max(0, self.shape.layers - setup.keep_last) * self.layer.hidden
        if "optimizer" in setup.offload:  # which takes its gradients in float32
            held["optimizer"] = self._optimizer() + self.trained * FLOAT // setup.ranks(1)
        if "weights" in setup.offload:
            held["weights"] = self._weights()
        return {part: size * min(setup.gpus, setup.gpus_per_node) for part, size in held.items()}

    def _weights(self) -> int:
        adapters = 0 if self.full else self.trained * FLOAT
        return (self.shape.parameters * self.setup.bytes + adapters) // self.setup.ranks(3)

    def _optimizer(self) -> int:
        setup = self.setup
        master = FLOAT if self.full and setup.bytes < FLOAT and setup.optimizer == "adamw" else 0
        return self.trained * (OPTIMIZERS[setup.optimizer] + master) // setup.ranks(1)

    # What comes and goes.

    def _gradients(self, parameters: int) -> int:
        if "optimizer" in self.setup.offload:
            return 0
        size = parameters * self.setup.bytes
        if not self.full:
            size = self.trained * FLOAT * parameters // self.shape.parameters
        return size // self.setup.ranks(2)

    def _communication(self, progress: Progress) -> int:
        """FSDP2 keeps what is outside of the layers gathered, and its gradients whole until the end."""
        setup, shape = self.setup, self.shape
        away = "optimizer" in setup.offload
        if setup.ranks(3) == 1 and "weights" not in setup.offload:
            return min(BUCKET, self.trained) * setup.bytes if setup.gpus > 1 or away else 0
        weights = progress.outer * shape.outer_parameters + progress.gathered * shape.layer_parameters
        counted = 0 if away else progress.whole // setup.ranks(2)
        return (weights + (progress.whole - counted if self.full else 0)) * setup.bytes

    def _inputs(self, waiting: int, backward: bool) -> int:
        """Of the first so many layers, those on the GPU: if offloaded, the one that is needed, in the backward also the
        next on its way; and under adapters the first, a leaf then that autograd holds on to."""
        if "activations" in self.setup.offload:
            kept = max(0, waiting - (self.shape.layers - self.setup.keep_last))
            waiting = min(waiting, max(kept, 1) + backward) + (not self.full)
        leaf = not self.full and self.shape.scales_embedding  # whose product is the first layer's input
        return (waiting + leaf) * self.layer.hidden

    def _loss(self) -> Parts:
        """Tiled: hidden states and their gradient; a tile of logits, then the sum of weight gradients rounded, or of a
        single tile the rounded gradient alone. Untiled: the size of the logits three times in float32."""
        shape, setup, hidden = self.shape, self.setup, self.layer.hidden
        kept = {"norms": self.tokens * self.layer.final_norm.kept}
        if "loss" not in setup.tiles:
            return {"loss": hidden + self.tokens * shape.vocab * (3 * FLOAT + shape.softcap * setup.bytes), **kept}
        rows = min(self.tokens, chunk_tokens(shape, setup))
        tile = rows * shape.vocab * setup.bytes
        if self.full:
            gradient = shape.head_parameters * setup.bytes
            several = rows < self.tokens
            tile = shape.head_parameters * FLOAT + max(tile, gradient) if several else tile + gradient
        return {"loss": 2 * hidden + tile, **kept}
