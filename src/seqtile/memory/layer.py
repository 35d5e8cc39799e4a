"""What is alive while a layer is computed again and differentiated: a list for each moment at which it may peak.

The lists follow Hugging Face's code line by line, `seqtile.ops`, `seqtile.sp`, and FlashAttention-2's workspace: dq in
float32, and dk and dv for every query head where heads share keys. What waits outside of the layer is in `step`. All in
bytes of one GPU, for its `tokens`.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from seqtile.memory.setup import Setup
from seqtile.memory.shape import Shape

MIN_CHUNK_TOKENS = 2048  # as in seqtile.ops.tiles, which needs torch
FLOAT = 4

Parts = dict[str, int]
"""Bytes by what they are for."""


class Working(NamedTuple):
    """A moment of a layer's backward."""

    name: str
    parts: Parts
    done: int
    """Parameters of the layer that have their gradients."""


@dataclass(frozen=True)
class Norm:
    """A norm over `width` elements a token, in bytes a token."""

    kind: str
    """As in `shape.Norms`, or "light", which is Liger's: it keeps its input and no float32."""
    width: int
    element: int
    trained: bool
    in_place: bool
    """Whether Liger's writes over its gradient."""

    @property
    def kept(self) -> int:
        """From its forward to its backward, besides its output (and its input, if that is light's)."""
        if self.kind == "light":
            return self.width * self.element
        if self.kind == "rms":  # the input in float32; what the weight multiplies
            return self.width * (FLOAT + self.element * self.trained)
        return self.width * FLOAT * ({"olmo": 1, "gemma": 1, "layer": 2}[self.kind] + self.trained)

    @property
    def backward(self) -> int:
        """At the peak of its backward, gradient and what was kept included."""
        if self.kind == "light":
            return self.width * self.element * (2 if self.in_place else 3)
        return self.width * FLOAT * (7 if self.kind == "layer" else 6)  # its input, gradients of it, of its square


class Layer:
    """A decoder layer, `tokens` of it on this GPU."""

    def __init__(self, shape: Shape, setup: Setup, tokens: int):
        self.shape, self.setup, self.tokens = shape, setup, tokens
        self.trained = setup.lora_rank is None
        self.tiled = "mlp" in setup.tiles and tokens > mlp_chunk_tokens(shape, setup)
        self.hidden = tokens * shape.hidden * setup.bytes
        """Bytes of a tensor of hidden states."""
        self.kind = "light" if setup.liger else shape.norms.kind
        self.light_mlp = setup.liger and "mlp" not in setup.tiles
        """Whether Liger's product of gate and up runs: not where the MLP is tiled, however short the sequence."""
        self.norm = self.norm_over(shape.hidden)
        tiled = Norm("light", shape.hidden, setup.bytes, self.trained, in_place=False)
        self.final_norm = tiled if "layer" in setup.tiles else self.norm
        """Behind the last layer; tiled with the layers, whatever the length."""

    def norm_over(self, width: int) -> Norm:
        return Norm(self.kind, width, self.setup.bytes, self.trained, in_place=not self.shape.norms.after)

    def moments(self) -> list[Working]:
        """In the order of the backward. The gradient of what a branch is added to is alive throughout."""
        norms, shape = self.shape.norms, self.shape
        gradient, norm = self.hidden, self.tokens * self.norm.backward
        inside = self._into_attention() + self._attended()
        after = self.tokens * self.norm.kept if norms.after else 0
        attention = inside + self._into_output() + after
        into_mlp = 0 if norms.parallel else self._before() or self.hidden
        down = 0 if self.tiled or shape.experts else shape.mlp_parameters // 3
        moments = []
        if not self.trained:  # what it adds, twice in float32, before that is added
            added = self.tokens * shape.hidden * (self.setup.bytes + 2 * FLOAT)
            parts = {"attention": inside + self._into_output() + added, "norms": gradient}
            moments.append(Working("adapter after attention", parts, 0))
        mlp = shape.mlp_parameters
        moments.append(Working("MLP", {"mlp": self._mlp(), "attention": attention, "norms": into_mlp + gradient}, down))
        if norms.after:
            kept = {"mlp": 0 if self.tiled else self._kept_by_mlp(), "attention": attention}
            moments.append(Working("norm after the MLP", {**kept, "norms": into_mlp + gradient + norm}, 0))
            parts = {"attention": attention - after, "norms": gradient + norm}
            moments.append(Working("norm after attention", parts, mlp))
        if norms.before and not norms.parallel:
            moments.append(Working("norm before the MLP", {"attention": attention, "norms": gradient + norm}, mlp))
        gradients = gradient * (2 if norms.parallel else 1)
        moments.append(Working("attention", {"attention": inside + self._attention(), "norms": gradients}, mlp))
        if norms.before:
            moments.append(Working("norm before attention", {"norms": gradient + norm}, shape.layer_parameters))
        return moments

    # What is kept between forward and backward.

    def _before(self) -> int:
        """By a norm before a branch, and its output."""
        return self.tokens * self.norm.kept + self.hidden if self.shape.norms.before else 0

    def _into_attention(self) -> int:
        """By the norms before it and of its heads. The layer's input is counted where it waits."""
        before = self._before()
        if before and (self.kind == "light" or self.setup.bytes == FLOAT):  # else the norm keeps a copy in float32
            before -= self.hidden
        of_heads = self.norm_over(self.shape.q + self.shape.kv).kept if self.shape.norms.of_heads else 0
        projections = 1 if self.shape.fused_qkv else 3
        return before + self.tokens * of_heads + projections * self._for_adapters(self.shape.hidden)

    def _attended(self) -> int:
        """Queries, keys, values, output and log-sum-exp of attention."""
        q, kv, _ = self._shares()
        whole = q + kv if self.shape.fused_qkv and not self.setup.liger else 0  # which the values are a slice of
        return 2 * q + 2 * kv + whole + self._lse()

    def _into_output(self) -> int:
        """By the output projection, where that is not attention's own output."""
        here = self.tokens * self.shape.q * self.setup.bytes if self.setup.sequence_parallel > 1 else 0
        return here + self._for_adapters(self.shape.q)

    def _for_adapters(self, width: int) -> int:
        """By the adapter of a projection of so wide an input: a copy of it in float32."""
        return 0 if self.trained or self.setup.bytes == FLOAT else self.tokens * width * FLOAT

    def _lse(self) -> int:
        return self.tokens * self.shape.heads * FLOAT

    def _shares(self) -> tuple[int, int, bool]:
        """Bytes of the queries and of the keys that attention reads on the GPU with most of them; whether heads share
        keys there."""
        shape, size = self.shape, self.setup.sequence_parallel
        a_head = self.tokens * size * shape.head_dim * self.setup.bytes
        if size > shape.heads:  # GPUs share the queries of a head
            return a_head // (size // shape.heads), a_head, False
        group = shape.heads // shape.kv_heads
        spans = pairwise(rank * shape.heads // size for rank in range(size + 1))
        heads, kv_heads = max((last - first, (last - 1) // group + 1 - first // group) for first, last in spans)
        return a_head * heads, a_head * kv_heads, heads > kv_heads

    def _kept_by_mlp(self) -> int:
        """Untiled: gate, up, their product, and the activation unless Liger computes it again."""
        shape, setup = self.shape, self.setup
        adapters = (1 if shape.fused_gate_up else 2) * self._for_adapters(shape.hidden) + self._for_adapters(shape.mlp)
        return self.tokens * shape.mlp * setup.bytes * (3 if self.light_mlp else 4) + adapters

    # What their backwards need.

    def _attention(self) -> int:
        """Gradients of the output and of q, k and v; the workspace."""
        q, kv, grouped = self._shares()
        expanded = 2 * q if grouped else 0
        return q + (q + 2 * kv) + q * FLOAT // self.setup.bytes + expanded + self._lse()

    def _mlp(self) -> int:
        """Tiled: with the sums of weight gradients in float32, their roundings, the gradients of input and output."""
        shape, setup = self.shape, self.setup
        rows = min(self.tokens, mlp_chunk_tokens(shape, setup)) if self.tiled else self.tokens
        weights = 3 * shape.hidden * shape.mlp * max(shape.experts, 1) if self.trained else 0
        sums = weights * FLOAT if self.tiled else 0
        if shape.experts:
            return sums + self._experts(rows * shape.experts_per_token, weights) + self.hidden
        if not self.tiled:
            gradients = 1 if self.light_mlp and self.trained else 2  # Liger's are written over what was kept
            return self._kept_by_mlp() + rows * shape.mlp * setup.bytes * gradients
        rounded = weights * setup.bytes if setup.bytes < FLOAT else 0
        d_output = self.hidden if shape.norms.after else 0
        return 3 * rows * shape.mlp * setup.bytes + sums + rounded + self.hidden + d_output

    def _experts(self, rows: int, weights: int) -> int:
        """Of so many pairs of a token and an expert: the most of three moments of Hugging Face's grouped products."""
        d, m, size = self.shape.hidden, self.shape.mlp, self.setup.bytes
        weighted = size if self.shape.model_type == "qwen3_moe" else FLOAT  # the dtype in which outputs are weighted
        return max(
            rows * (4 * m * size + d * (2 * size + 3 * weighted)),
            rows * (5 * m + 3 * d) * size + weights // 3 * size,
            rows * (2 * m + 2 * d) * size + weights * size,
        )


def mlp_chunk_tokens(shape: Shape, setup: Setup) -> int:
    """Tokens of a tile of the MLP."""
    return chunk_tokens(shape, setup, shape.experts / shape.experts_per_token if shape.experts else 1)


def chunk_tokens(shape: Shape, setup: Setup, spread: float = 1) -> int:
    """Tokens of a tile: the rule of seqtile.ops.tiles."""
    return setup.chunk_tokens or max(shape.hidden, int(MIN_CHUNK_TOKENS * spread))
