"""A training step on one GPU as moments: all that is alive at each, by what it is for."""

from dataclasses import dataclass

from seqtile.memory.layer import FLOAT, MIN_CHUNK_TOKENS, Layer, Parts
from seqtile.memory.setup import GIB, OPTIMIZERS, Setup
from seqtile.memory.shape import Shape

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
gathered and gradients not yet spread. `reserved`: the CUDA context, and NCCL (about 1 GiB each: Arctic Long Sequence
Training, 2.1)."""
BUCKET = 500_000_000  # elements that are reduced at a time: DeepSpeed's default


@dataclass(frozen=True)
class Moment:
    name: str
    parts: Parts

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


class Step:
    """Forward and backward of `tokens` on this GPU; ZeRO-3 as FSDP2 does it, layer by layer."""

    def __init__(self, shape: Shape, setup: Setup, tokens: int):
        self.shape, self.setup, self.tokens = shape, setup, tokens
        self.layer = Layer(shape, setup, tokens)
        self.full = setup.lora_rank is None
        self.trained = shape.parameters if self.full else shape.adapter_parameters(setup.lora_rank)

    def moments(self) -> list[Moment]:
        """In the order of a step."""
        shape, layers = self.shape, self.shape.layers
        norm = self.tokens * self.layer.norm.backward
        head = shape.head_parameters + shape.hidden
        moments = [
            self._moment("loss", self._loss(), layers),
            self._moment("final norm", {"norms": norm}, layers, head),
        ]
        for which, waiting, done in (
            ("last", layers, head),
            ("first", 1, head + (layers - 1) * shape.layer_parameters),
        ):
            for name, parts in self.layer.moments():
                here = {"MLP": 0, "norm after the MLP": 0, "norm before attention": shape.layer_parameters}
                so_far = here.get(name, shape.mlp_parameters)
                moments.append(self._moment(f"{name}, {which} layer", parts, waiting, done, so_far))
        embedding = shape.head_parameters * self.setup.bytes * (3 if shape.tied else 1) if self.full else 0
        parts = {"norms": self.layer.hidden, "gradients": embedding}
        moments.append(self._moment("embedding", parts, 0, shape.parameters - shape.head_parameters))
        return moments

    def _moment(self, name: str, parts: Parts, waiting: int, done: int = 0, here: int = 0) -> Moment:
        """`parts`, while the inputs of the first `waiting` layers wait and the backward of `done` parameters of other
        layers, and of `here` of this one, is over."""
        positions = 2 * self.tokens * self.shape.head_dim * self.setup.bytes
        everything = dict.fromkeys(PARTS, 0) | self.states()
        others = {
            "inputs": self._inputs(waiting),
            "gradients": self._gradients(done + here),
            "communication": self._communication(here),
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
        parameters = self.shape.parameters + (0 if self.full else self.trained)
        return parameters * self.setup.bytes // self.setup.ranks(3)

    def _optimizer(self) -> int:
        setup = self.setup
        master = FLOAT if setup.bytes < FLOAT and setup.optimizer == "adamw" else 0
        return self.trained * (OPTIMIZERS[setup.optimizer] + master) // setup.ranks(1)

    # What comes and goes.

    def _gradients(self, parameters: int) -> int:
        if "optimizer" in self.setup.offload:
            return 0
        if not self.full:
            parameters = self.trained * parameters // self.shape.parameters
        return parameters * self.setup.bytes // self.setup.ranks(2)

    def _communication(self, here: int) -> int:
        """FSDP2 keeps what is outside of the layers gathered, and its gradients whole until the end; of the layers it
        has this one and the next that is on its way."""
        setup, shape = self.setup, self.shape
        away = "optimizer" in setup.offload
        if setup.ranks(3) == 1 and "weights" not in setup.offload:
            return min(BUCKET, self.trained) * setup.bytes if setup.gpus > 1 or away else 0
        gathered = shape.outer_parameters + 2 * shape.layer_parameters
        whole = shape.head_parameters + here if self.full else 0
        counted = 0 if away else whole // setup.ranks(2)
        return (gathered + whole - counted) * setup.bytes

    def _inputs(self, waiting: int) -> int:
        """Of the first so many layers, those on the GPU: of offloaded ones, the one on its way. Under adapters autograd
        holds on to the first, a leaf then."""
        if "activations" in self.setup.offload:
            kept = max(0, waiting - (self.shape.layers - self.setup.keep_last))
            waiting = min(waiting, kept + 1 + (not self.full))
        return waiting * self.layer.hidden

    def _loss(self) -> Parts:
        """Tiled: hidden states and their gradient; a tile of logits, then the sum of weight gradients rounded. Untiled:
        the size of the logits three times in float32."""
        shape, setup, hidden = self.shape, self.setup, self.layer.hidden
        kept = {"norms": self.tokens * self.layer.norm.kept}
        if "loss" not in setup.tiles:
            return {"loss": hidden + self.tokens * shape.vocab * (3 * FLOAT + shape.softcap * setup.bytes), **kept}
        rows = min(self.tokens, setup.chunk_tokens or max(shape.hidden, MIN_CHUNK_TOKENS))
        tile = rows * shape.vocab * setup.bytes
        if self.full:
            tile = shape.head_parameters * FLOAT + max(tile, shape.head_parameters * setup.bytes)
        return {"loss": 2 * hidden + tile, **kept}
