"""A training step on one GPU as a list of moments, each with everything that is alive then, by purpose."""

from collections.abc import Iterator
from dataclasses import dataclass

from seqtile.memory.batch import Batch
from seqtile.memory.layer import Alive, Layer, planned_groups
from seqtile.memory.network import Traffic, traffic
from seqtile.memory.setup import FLOAT, GIB, OPTIMIZERS, Setup
from seqtile.memory.shape import Shape

BUCKET = 500_000_000  # elements that are reduced at a time: DeepSpeed's default

Parts = dict[str, int]
"""Bytes by purpose. `inputs`: the layers' inputs, kept for the backward. `norms`: norms, residuals and positions.
`communication`: gathered weights, and gradients that are not yet sharded or reduced. `reserved`: the CUDA context and
NCCL (about 1 GiB each: Arctic Long Sequence Training, 2.1)."""


@dataclass(frozen=True)
class Moment:
    """A moment of a step, with everything that is on the GPU then."""

    name: str
    """What the step computes, such as "loss" or "MLP, layer 3 of 32"."""
    parts: Parts
    """Bytes by purpose: weights, gradients, optimizer, inputs (of the layers, kept for their backward), attention, mlp,
    norms (with residuals and positions), loss, communication (gathered weights, gradients being reduced) or reserved
    (for CUDA and NCCL)."""

    @property
    def bytes(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plan:
    """A step's memory: on one GPU at every moment at which it may peak, and in the host memory of a node."""

    shape: Shape
    """The widths of the model."""
    setup: Setup
    """The planned setup."""
    seq_len: int
    """Tokens per sequence, over all the GPUs that share it."""
    batch_size: int
    """Sequences per step."""
    moments: tuple[Moment, ...]
    """The moments at which memory may peak, in the order of a step."""
    host: Parts
    """Bytes in the host memory of a node, by purpose: "inputs", "optimizer", "weights"."""
    network: Traffic | None = None
    """Bytes that a node receives from others; None on one node, and of an evaluation."""

    @property
    def peak(self) -> Moment:
        """The moment with most bytes; its `parts` are the breakdown."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def gpu_bytes(self) -> int:
        """The bytes on a GPU at the peak."""
        return self.peak.bytes

    @property
    def host_bytes(self) -> int:
        """The bytes in the host memory of a node."""
        return sum(self.host.values())

    @property
    def bound(self) -> str | None:
        """The memory that is too small, and for what; None if all fits."""
        if self.gpu_bytes > self.setup.gpu_memory_gib * GIB:
            states = sum(self.peak.parts[part] for part in ("weights", "optimizer", "reserved"))
            too_much = states > self.setup.gpu_memory_gib * GIB
            return f"GPU memory: {'weights and optimizer' if too_much else self.peak.name.split(', ')[0]}"
        return "host memory" if self.host_bytes > self.setup.host_memory_gib * GIB else None

    @property
    def heads_at_once(self) -> int:
        """The query heads that attention on a GPU computes at once."""
        groups = planned_groups(self.shape, self.setup) or 1
        sharers = self.setup.sharers(self.shape.heads // groups, self.shape.kv_heads // groups)
        return -(-self.shape.heads // (groups * sharers))

    @property
    def fits(self) -> bool:
        """True if neither memory is too small."""
        return self.bound is None

    def __str__(self) -> str:
        lines = [f"{part:<14}{size / GIB:>9.2f} GiB" for part, size in self.peak.parts.items() if size]
        verdict = "fits" if self.fits else f"does not fit in {self.bound}"
        lines.append(f"{'on a GPU':<14}{self.gpu_bytes / GIB:>9.2f} of {self.setup.gpu_memory_gib:g} GiB: {verdict}")
        lines.append(f"most at: {self.peak.name}")
        lines += [f"{f'{part}, host':<18}{size / GIB:>9.2f} GiB a node" for part, size in self.host.items()]
        return "\n".join(lines)


class Step:
    """A training step of a batch on a GPU, forward and backward; ZeRO-3 as FSDP2 does it, layer by layer."""

    def __init__(self, shape: Shape, setup: Setup, batch: Batch):
        self.shape, self.setup, self.batch, self.tokens = shape, setup, batch, batch.tokens
        self.layer = Layer(shape, setup, batch)
        self.trained = shape.parameters if setup.full else shape.adapter_parameters(setup.lora_rank)
        adapters = 0 if setup.full else self.trained * FLOAT
        self.layer_weights = _layer_weights(shape, setup)
        weights = shape.outer_parameters * setup.weight_bytes + shape.layers * self.layer_weights
        self.weights = (weights + adapters) // setup.ranks(3)
        gradients = self.trained * (FLOAT if setup.zero_stage == 3 or not setup.full else setup.weight_bytes)  # FSDP2's
        self.network = traffic(shape, setup, batch.rows * batch.seq_len, weights + adapters, gradients)
        states = self.trained * setup.optimizer_bytes
        if setup.full and setup.optimizer == "adamw_8bit":  # for embeddings, in float32
            states += shape.head_parameters * (OPTIMIZERS["adamw"] - OPTIMIZERS["adamw_8bit"])
        self.optimizer = states // setup.ranks(1)

    def host(self) -> Parts:
        """Returns the bytes in the host memory of a node, for all its GPUs."""
        setup, held = self.setup, {}
        if "activations" in setup.offload:
            held["inputs"] = max(0, self.shape.layers - setup.keep_last) * self.layer.hidden
        if "optimizer" in setup.offload:  # which takes its gradients in float32
            held["optimizer"] = self.optimizer + self.trained * FLOAT // setup.ranks(1)
        if "weights" in setup.offload:
            held["weights"] = self.weights
        return {part: size * min(setup.gpus, setup.gpus_per_node) for part, size in held.items()}

    def moments(self) -> Iterator[Moment]:
        """Yields the moments in the order of a step. Sizes grow or shrink evenly from layer to layer except at both
        ends, so the two layers at each end represent all layers."""
        shape, layers, hidden, norm = self.shape, self.shape.layers, self.layer.hidden, self.layer.final_norm
        full, matrix = self.setup.full, shape.head_parameters
        # FSDP2 gathers weights into a buffer and copies them out; it frees the previous buffer afterwards.
        twice = shape.outer_parameters > shape.layer_parameters
        gathered, outer = (2, 2) if twice else (3, 1)
        yield self._moment(Alive("forward", norms=hidden), 0, gathered=gathered, outer=outer)
        if self.layer.cached:  # for all layers but the last, whose weights arrive
            last = Alive("forward, last layer", mlp=(layers - 1) * self.layer.cached, norms=hidden)
            yield self._moment(last, layers - 1, gathered=3)
        for alive in self._loss():
            yield self._moment(alive, layers)
        head = matrix + shape.hidden
        # A tied matrix's gradient as a head waits for its gradient as an embedding, before both are added to earlier
        # ones.
        waits = self.setup.accumulate and full and shape.tied and self.setup.ranks(3) == 1
        tied_head_gradient = matrix * self.setup.weight_bytes if waits else 0
        if self.batch.shared and "loss" in self.setup.tiles:
            summed = self._summed() + tied_head_gradient
            yield self._moment(Alive("hidden states", matrix, norms=norm.kept, gradients=summed), layers, matrix)
        final_norm = Alive("final norm", head, norms=norm.backward, gradients=tied_head_gradient)
        yield self._moment(final_norm, layers, matrix)
        for place in sorted({layers, max(layers - 1, 1), min(2, layers), 1}, reverse=True):
            done = head + (layers - place) * shape.layer_parameters
            gathered = 1 + (place > 1) + (place < layers and full)  # this layer, the next, the previous one's gradients
            for alive in self.layer.moments():
                gradients, name = alive.gradients + tied_head_gradient, f"{alive.name}, layer {place} of {layers}"
                here = alive._replace(name=name, done=done + alive.done, gradients=gradients)
                yield self._moment(here, place, matrix + alive.done, gathered, backward=True)
        copies = (3 if shape.tied else 1) if full else 0  # tied: both, and their sum
        embedding = matrix * self.setup.weight_bytes * copies
        last = Alive("embedding", shape.parameters - matrix, norms=hidden, gradients=embedding)
        yield self._moment(last, 0, 0 if shape.tied else matrix)

    def evaluation(self) -> Iterator[Moment]:
        """Yields the moments of an evaluation between two steps, for its last layer only. Hugging Face's models create
        a cache of keys and values; seqtile's models create none if they compute the loss."""
        shape, setup, layer, tokens = self.shape, self.setup, self.layer, self.tokens
        cache = 0 if "loss" in setup.tiles else shape.layers * 2 * tokens * shape.kv * setup.weight_bytes
        logits = min(tokens, layer.loss_chunk) * shape.vocab * setup.bytes
        if "loss" not in setup.tiles:  # also in float32, and their logarithms
            logits = tokens * shape.vocab * (2 * FLOAT + setup.bytes * (setup.bytes < FLOAT))
            if self.batch.shared:  # the logits of labelled tokens are copied
                logits += (2 * self.batch.labelled - tokens) * shape.vocab * FLOAT
        yield next(self.moments())
        moments = [alive._replace(name=f"{alive.name}, last layer") for alive in layer.evaluated()]
        moments.append(Alive("final norm", norms=2 * layer.hidden + layer.final_norm.evaluated))
        moments.append(Alive("loss", norms=layer.hidden, loss=logits + setup.cast(shape.head_parameters)))
        for alive in moments:
            held = {"attention": alive.attention + cache, "mlp": alive.mlp + shape.layers * layer.cached}
            yield self._moment(alive._replace(**held), None, gathered=2 if "layer" in alive.name else 1)

    def _moment(
        self, alive: Alive, kept: int | None, whole: int = 0, gathered: int = 1, outer: int = 1, backward: bool = False
    ) -> Moment:
        """Returns everything that is on the GPU.

        Args:
            alive: what is computed, with the model's parameters that have gradients.
            kept: the number of layers, from the first, whose inputs are saved; None in an evaluation, which saves none.
            whole: parameters whose gradients exist and are not yet sharded over the GPUs.
            gathered: layers whose weights, or gradients in transit, are whole.
            outer: the number of copies of the weights outside of the layers.
            backward: whether it is the backward of a layer.
        """
        setup, shape = self.setup, self.shape
        waiting = shape.parameters if setup.accumulate and kept is not None else alive.done
        adapters = self.trained * FLOAT * waiting // shape.parameters
        done = waiting * setup.weight_bytes if setup.full else adapters
        masks_freed = alive.name == "embedding" or (kept is None and alive.name == "loss")
        gradients = 0 if "optimizer" in setup.offload else done // setup.ranks(2)
        parts = {
            "weights": 0 if "weights" in setup.offload else self.weights,
            "gradients": gradients + alive.gradients,
            "optimizer": 0 if "optimizer" in setup.offload else self.optimizer,
            "inputs": (0 if kept is None else self._inputs(kept, backward)) + self._whole_inputs(alive.name),
            "attention": alive.attention + (0 if masks_freed else self.layer.squares.masks),
            "mlp": alive.mlp,
            "norms": alive.norms + 2 * self.tokens * shape.head_dim * setup.weight_bytes,  # and positions
            "loss": alive.loss,
            "communication": self._communication(whole, gathered, outer),
            "reserved": GIB * (2 if setup.gpus > 1 else 1),
        }
        return Moment(alive.name, parts)

    def _communication(self, whole: int, gathered: int, outer: int) -> int:
        """Returns the bytes of communication. FSDP2 keeps the weights outside of the layers gathered, and their
        gradients whole, until the end."""
        setup, shape, away = self.setup, self.shape, "optimizer" in self.setup.offload
        if setup.ranks(3) == 1 and "weights" not in setup.offload:
            return min(BUCKET, self.trained) * setup.weight_bytes if setup.gpus > 1 or away else 0
        weights = outer * shape.outer_parameters * setup.weight_bytes + gathered * self.layer_weights
        counted = 0 if away or setup.accumulate else whole // setup.ranks(2)
        return weights + (whole - counted if setup.full else 0) * setup.weight_bytes

    def _inputs(self, waiting: int, backward: bool) -> int:
        """Returns the bytes of the first `waiting` layers' inputs that are on the GPU. If offloaded: the one in use, in
        the backward also the next one on its way, and with adapters the first, a leaf that autograd holds."""
        frozen = not self.setup.full
        if "activations" in self.setup.offload:
            kept = max(0, waiting - (self.shape.layers - self.setup.keep_last))
            waiting = min(waiting, max(kept, 1) + backward) + frozen
        leaf = frozen and self.shape.arch.embedding_scale is not None  # scaled, it is the first layer's input
        return (waiting + leaf) * self.layer.hidden

    def _whole_inputs(self, moment: str) -> int:
        """Returns the bytes that each GPU holds for all tokens if GPUs share a sequence or sequences share tokens: ids,
        labels and positions; and until the text model ends, the embeddings that a multimodal model fills; then their
        gradient."""
        setup = self.setup
        if not self.batch.shared and (setup.batches == "cut" or setup.sequence_parallel == 1):
            return 0
        embedded = self.shape.inside is not None and moment.startswith(("forward", "embedding"))
        whole = self.batch.rows * self.batch.seq_len if self.batch.shared else setup.sequence_parallel * self.tokens
        return whole * (3 * 8 + embedded * self.shape.hidden * setup.weight_bytes)

    def _loss(self) -> Iterator[Alive]:
        """Yields the moments of the loss. Tiled: hidden states and their gradient; a chunk of logits, then the rounded
        sum of weight gradients (with a single chunk, only the rounded gradient). Untiled: three times the size of the
        logits in float32. The forward also has autocast's cache and, if untiled, the logits before their cast to
        float32."""
        shape, setup, layer = self.shape, self.setup, self.layer
        head, cached, norms = setup.cast(shape.head_parameters), shape.layers * layer.cached, layer.final_norm.kept
        batch = self.batch
        if "loss" not in setup.tiles:
            logits, labelled = self.tokens * shape.vocab, batch.labelled * shape.vocab
            kept = layer.inputs(1) + head + logits * shape.softcap * setup.bytes
            if setup.autocast:
                copied = 2 * labelled if batch.shared else logits
                forward = kept + layer.hidden + logits * (FLOAT + setup.bytes) + copied * FLOAT
                yield Alive("logits", mlp=cached, norms=norms, loss=forward)
            three = labelled + 2 * logits if batch.shared else 3 * logits
            yield Alive("loss", norms=norms, loss=kept + three * FLOAT)
            return
        rows = min(batch.labelled, layer.loss_chunk)
        chunk = rows * shape.vocab * setup.bytes
        if setup.full:
            gradient = 0 if setup.autocast else shape.head_parameters * setup.bytes
            several = rows < batch.labelled
            chunk = shape.head_parameters * FLOAT + max(chunk, gradient) if several else chunk + gradient
        copied = 2 * layer.hidden * batch.labelled // self.tokens if batch.shared else layer.hidden
        yield Alive("loss", mlp=cached, norms=norms, loss=layer.hidden + copied + chunk + head)

    def _summed(self) -> int:
        """Returns the bytes of the float32 gradient sums for the hidden states that sequences share."""
        size = self.setup.weight_bytes
        return self.shape.hidden * (self.tokens * FLOAT + self.batch.labelled * (size + (FLOAT if size < FLOAT else 0)))


def _layer_weights(shape: Shape, setup: Setup) -> int:
    """Returns the bytes of a layer's weights. 4-bit loading quantizes the matrices of attention and MLP: each block of
    64 weights has an 8-bit scale, and each block of 256 scales a 32-bit one."""
    if not setup.load_in_4bit:
        return shape.layer_parameters * setup.weight_bytes
    projections = shape.hidden * (2 * (shape.q + shape.kv) + 3 * shape.mlp * max(shape.experts, 1))
    codes = projections // 2 + projections // 64 + projections // (64 * 256) * FLOAT
    return codes + (shape.layer_parameters - projections) * setup.bytes
