"""Counts the bytes alive while a layer is recomputed and differentiated, at each moment at which memory may peak.

`test/memory/test_against_simulation.py` compares the counts with every allocation of simulated steps, to 5 %. The sums
follow the code of Hugging Face, `seqtile.ops` and `seqtile.sp`. FlashAttention-2's workspace is added: dq in float32,
and dk and dv for every query head if heads share keys; `squares` counts masks and scores, and `step` tensors outside of
the layer. All numbers are bytes of one GPU, for its tokens. Every layer is checkpointed and keeps only its input
between forward and backward.

A layer runs in one of two ways, each with its own moments, in the order of its backward:

    its MLP tiled, or nothing    MLP > norm after > norm before MLP > attention > norm before attention
    tiled as a whole             MLP, norms included > attention, group by group > projections > norm before attention

An evaluation saves nothing for a backward, and peaks in attention, the MLP or a norm.
"""

from collections.abc import Iterator
from typing import NamedTuple

from seqtile.memory.batch import Batch
from seqtile.memory.setup import FLOAT, Setup, expect
from seqtile.memory.shape import Shape
from seqtile.memory.squares import squares_of
from seqtile.rules import default_chunk_tokens, heads_of_rank, number_of_groups


class Alive(NamedTuple):
    """A moment: what is computed then, and the bytes alive, by purpose."""

    name: str
    done: int = 0
    """The number of parameters whose gradients exist; in a layer's moments, of that layer."""
    attention: int = 0
    mlp: int = 0
    norms: int = 0
    loss: int = 0
    gradients: int = 0
    """Bytes of gradients other than those of the `done` parameters."""


class ModuleBytes(NamedTuple):
    """The bytes of a norm or an MLP."""

    kept: int
    """From its forward to its backward, without its output (and, for Liger's norm, without its input)."""
    backward: int
    """At the peak of its backward, including gradients and `kept`."""
    evaluated: int
    """At the peak of a forward without autograd, without its input; for an MLP in chunks, with its output."""


def chunk_tokens(shape: Shape, setup: Setup, mlp: bool = False) -> int:
    """Returns the tokens per chunk of the loss; with `mlp` those of checkpointed MLPs and layers."""
    sparsity = shape.experts / shape.experts_per_token if mlp and shape.experts else 1
    mlp_size = shape.mlp if mlp else 0
    return setup.chunk_tokens or default_chunk_tokens(shape.hidden, sparsity, mlp_size, setup.bytes)


def planned_groups(shape: Shape, setup: Setup) -> int | None:
    """Returns the number of groups of kv heads; None if all attend at once. Raises ValueError if the groups do not
    divide the kv heads, or leave a GPU without its own kv head in a group (which can run but has no formula here)."""
    heads, ranks = shape.kv_heads, setup.sharers(shape.heads, shape.kv_heads)
    groups = number_of_groups(heads, setup.head_groups, ranks)
    if groups is not None:
        each = f"so that each of the {ranks} GPUs that share a sequence has a kv head of its own in every group"
        enough = ranks == 1 or heads // groups >= ranks
        expect("head_groups", enough, f"at most {heads // ranks} groups, {each}", groups)
    return groups


def head_shares(shape: Shape, setup: Setup, tokens: int) -> tuple[int, int, int]:
    """Returns the bytes of the queries and of the keys that attention reads on the GPU with most of them, and of keys
    of which the backward has gradients besides; 0 if query heads share no keys there."""
    sharers = setup.sharers(shape.heads, shape.kv_heads)
    a_token = tokens * shape.head_dim * setup.bytes
    of_queries, of_keys = a_token * sharers, a_token * setup.sequence_parallel
    # GPUs that share a head's queries, on several nodes or one, have two runs of them, each with a copy of its keys.
    parts = setup.sequence_parallel // sharers * max(1, sharers // shape.heads)
    of_keys += of_keys // (2 * parts) if parts > 1 else 0
    if sharers > shape.heads:
        return of_queries // (sharers // shape.heads), of_keys, 0
    shares = (heads_of_rank(rank, sharers, shape.heads, shape.kv_heads) for rank in range(sharers))
    heads, kv_heads = max((q.stop - q.start, kv.stop - kv.start) for q, kv in shares)
    if heads > kv_heads and parts == 1:
        return of_queries * heads, of_keys * kv_heads, of_keys * heads
    return of_queries * heads, of_keys * kv_heads, of_keys * kv_heads if heads > kv_heads else 0  # by_lengths.py


class Layer:
    """A decoder layer on a GPU, tiled as `setup` says if it has more tokens than a chunk."""

    def __init__(self, shape: Shape, setup: Setup, batch: Batch):
        self.shape, self.setup, self.batch = shape, setup, batch
        self.tokens = tokens = batch.tokens
        self.loss_chunk, self.mlp_chunk = chunk_tokens(shape, setup), chunk_tokens(shape, setup, mlp=True)
        self.chunk = min(tokens, self.mlp_chunk)
        """Tokens of a chunk of a layer that is tiled as a whole; it may be the only one."""
        self.tiled = "layer" in setup.tiles and tokens > self.loss_chunk
        self.tiled_mlp = "mlp" in setup.tiles and tokens > self.mlp_chunk
        self.hidden = tokens * shape.hidden * setup.weight_bytes
        """Bytes of a tensor of hidden states."""
        self.cast = tokens * shape.hidden * setup.bytes
        """Bytes of hidden states that a matmul reads or writes; under autocast a copy."""
        self.q, self.kv, expanded = head_shares(shape, setup, tokens)
        self.qkv = self.q + 2 * self.kv
        self.squares, self.eager = squares_of(shape, setup, batch), setup.attention == "eager"
        self.repeated = 2 * expanded if self.squares.kept else 0
        """Bytes of keys and values for every query head, where Hugging Face repeats them."""
        self.lse = 0 if self.squares.kept and self.eager else tokens * shape.heads * FLOAT
        """Bytes of attention's log-sum-exp, kept for the backward."""
        d_q = self.q * FLOAT // setup.bytes if self.lse else 0
        workspace = d_q + 2 * expanded + self.lse + self.squares.backward
        self.attention = self.q + self.qkv + workspace
        """Bytes that attention's backward adds: gradients of the output and of q, k, v; the workspace."""
        if batch.shared:
            self.attention, self.lse = self._calls_again(expanded), 0
        self.output = tokens * shape.q * setup.bytes if setup.sequence_parallel > 1 else 0
        """Bytes of attention's output for this GPU's tokens, if it is a separate tensor."""
        self.groups = planned_groups(shape, setup)
        self.final_norm = self.norm(shape.hidden, stream=True, chunked="layer" in setup.tiles)

    def _calls_again(self, expanded: int) -> int:
        """Returns the bytes that the backward of attention in several calls adds: gradients of the output; float32
        gradients of keys and values; gradients of queries for the finished calls; and for the call being recomputed its
        keys, values and output, all gradients, and the workspace."""
        size, everything, most, through = self.setup.bytes, self.tokens * self.batch.gpus, 0, 0
        for queries, keys in self.batch.calls():
            q, lse = (whole * queries // everything for whole in (self.q, self.lse * self.batch.gpus))
            kv = self.kv * keys // everything
            more = 2 * expanded * keys // everything
            most = max(most, through + 2 * q + 4 * kv + q * FLOAT // size + more + 2 * lse)
            through += q
        return self.q + 2 * self.kv * FLOAT // size + most

    def moments(self) -> Iterator[Alive]:
        """Yields the moments in the order of the backward."""
        return self._tiled() if self.tiled else self._untiled()

    @property
    def cached(self) -> int:
        """Bytes of the weight copies that autocast caches until the forward ends; tiled parts cache none."""
        if not self.setup.full or self.tiled:
            return 0
        return self.setup.cast(self.shape.attention_parameters + (0 if self.tiled_mlp else self.shape.mlp_parameters))

    def norm(self, width: int, stream: bool = False, chunked: bool = False) -> ModuleBytes:
        """Returns the bytes of a norm over `width` elements per token, of the residual stream (`stream`) or of a
        product's output. If it is `chunked`, it keeps as much as Liger's norm."""
        arch, elements = self.shape.arch, self.tokens * width
        size = self.setup.weight_bytes if stream else self.setup.bytes
        if chunked or self.setup.liger:
            in_place = not chunked and not arch.norm_after  # Liger's norm then overwrites its gradient
            return ModuleBytes(elements * size, elements * size * (2 if in_place else 3), elements * size)
        centred = arch.norm == "layer"
        weighted = size if arch.norm == "rms" else FLOAT  # of an element that the weight multiplies
        kept = FLOAT * (1 + centred) + weighted * self.setup.full  # the input in float32, also centred
        copied = size < FLOAT or not stream  # its input; in addition gradients of the input and of its square
        return ModuleBytes(elements * kept, elements * FLOAT * (5 + copied + centred), elements * FLOAT * 2)

    def _untiled(self) -> Iterator[Alive]:
        """Yields the moments of a layer whose MLP may be tiled. The gradient of the residual stream is alive
        throughout."""
        arch, shape, setup, hidden = self.shape.arch, self.shape, self.setup, self.hidden
        chunked = self.tiled_mlp
        norm, norm_after = (self.norm(shape.hidden, stream) for stream in (True, False))
        mlp, in_mlp = self._mlp(chunked), shape.mlp_parameters
        # The following is kept from forward to backward, in the order of the forward. The norm before attention keeps
        # the layer's input, which is counted elsewhere, or a float32 copy of it.
        copied = self.inputs(1 if "qkv" in arch.merged else 3)
        if arch.norm_before:
            copied += norm.kept - (hidden if setup.liger or setup.weight_bytes == FLOAT else 0)
        elif not setup.autocast:
            copied = 0
        head_norms = self.norm(shape.q + shape.kv).kept if arch.head_norm else 0
        adapters = (1 if "qkv" in arch.merged else 3) * self._adapter(shape.hidden)
        merged = self.q + self.kv if "qkv" in arch.merged and not setup.liger else 0  # the values are a slice of it
        weights = setup.cast(shape.attention_parameters)
        inside = copied + head_norms + adapters + weights + 2 * self.q + (self.repeated or 2 * self.kv) + merged
        inside += self.lse + self.squares.kept
        projected = inside + self.output + self._adapter(shape.q)
        after = norm_after.kept if arch.norm_after else 0
        attention = projected + after
        inputs = self.cast if chunked and setup.autocast else self.inputs(1 if "gate_up" in arch.merged else 2)
        norms = hidden + (0 if arch.parallel else norm.kept * arch.norm_before + inputs)
        if not setup.full:  # an adapter's output, twice in float32, before it is added
            added = self.cast + 2 * self.tokens * shape.hidden * FLOAT
            if setup.autocast:  # in half precision; float32: its input, queries, keys, and their input
                rotated = 0 if setup.liger else self.q + self.kv
                added = 4 * self.cast + (self.q + rotated) * FLOAT // setup.bytes + hidden
            yield Alive("adapter after attention", attention=projected + added, norms=hidden)
        down = 0 if chunked or shape.experts else in_mlp // 3
        yield Alive("MLP", down, attention, mlp.backward, norms)
        if arch.norm_after:
            yield Alive("norm after the MLP", 0, attention, mlp.kept, norms + norm_after.backward)
            yield Alive("norm after attention", in_mlp, attention - after, norms=hidden + norm_after.backward)
        if arch.norm_before and not arch.parallel:
            yield Alive("norm before the MLP", in_mlp, attention, norms=hidden + norm.backward)
        if self.batch.shared:  # only its consumer saves the output of several calls
            inside -= self.q
        yield Alive("attention", in_mlp, inside + self.attention, norms=hidden * (1 + arch.parallel))
        if arch.norm_before:
            yield Alive("norm before attention", shape.layer_parameters, norms=hidden + norm.backward)

    def _tiled(self) -> Iterator[Alive]:
        """Yields the moments of a layer that is tiled as a whole: only attention's tensors have the length of the
        sequence.

        With head chunks, queries, keys, values, their gradients and workspace exist for one group at a time.
        Attention's output is kept for all groups and freed group by group. The gradient of the MLP part's input is
        alive throughout; after the first group, so is the gradient of the projections' input.
        """
        shape, size, hidden = self.shape, self.setup.bytes, self.hidden
        count = self.groups or 1
        kept = self.q + self.lse  # attention's output, for all groups
        # MLP: attention's output by groups is gathered for a chunk; after all chunks the sums are rounded.
        chunks = self.chunk * (3 * (shape.mlp + shape.hidden) + (shape.q if count > 1 else 0)) * size
        chunks += self.setup.decoded(shape.mlp_parameters + shape.hidden * shape.q)
        sums = self._sums(shape.mlp_parameters)
        squares = self.repeated // count + self.squares.kept // (count if self.eager else 1)  # scores are of each head
        # groups recompute q, k, v, and all of an attention that keeps squares
        waiting = self.output + (self.qkv + squares if self.groups is None else 0)
        yield Alive("MLP", 0, kept + waiting, sums + max(chunks, self._rounded(sums)), 2 * hidden)
        # Attention. If GPUs share a sequence, one group is sent and another received while a third is computed.
        after, before = shape.mlp_parameters + shape.hidden * shape.q, shape.hidden * (shape.q + 2 * shape.kv)
        sums = self._sums(before)
        raw = self.q + self.kv if self.groups is not None and shape.arch.head_norm else 0  # before the norms of heads
        projected = self.qkv + raw
        group = (projected + self.attention) // count + squares
        local = self.output if self.groups is not None else 0
        sent = (self.qkv + projected) // count if local else 0
        decoded = self.setup.decoded(2 * shape.hidden * (shape.q + shape.kv))
        for past in range(min(count, 3)):  # finished groups; all later ones equal the third
            held = 0 if self.batch.shared else kept - self.q * past // count  # which several calls do not save
            alive = held + group + local * (count - 1 - past) // count + decoded
            alive += sent * ((past > 0) + (past < count - 1))
            started = past >= (2 if sent else 1)  # the sums of gradients; on their way, they come a group later
            name = f"attention, {past + 1} of {count} groups" if count > 1 else "attention"
            yield Alive(name, after, alive + sums * started, norms=hidden + self.cast * started)
        width = (shape.q + 2 * shape.kv) // count
        projecting = self.setup.cast(shape.hidden * width) + self.chunk * (shape.hidden + width) * size
        alive = kept * (count - 1) // count + projected // count + sums + projecting + decoded
        yield Alive("projections", after, alive, norms=hidden + self.cast)
        yield Alive("norm before attention", after, sums + self._rounded(sums) + decoded, norms=hidden + self.cast)

    def evaluated(self) -> Iterator[Alive]:
        """Yields the moments of a forward without autograd. Two tensors are alive throughout: the first layer's input,
        which the model holds, and this layer's input."""
        shape, setup, held = self.shape, self.setup, 2 * self.hidden
        if self.tiled:
            # An untiled loss implies a cache, with which heads are not computed in groups.
            chunk, count = self.chunk * setup.bytes, self.groups if self.groups and "loss" in setup.tiles else 1
            group = self.q + (self.qkv + self.lse + self.repeated) // count
            group += self.squares.evaluated // (count if self.eager else 1)
            if setup.sequence_parallel > 1:  # the next group arrives; attention's output is sent and received
                group = (self.q * (max(count, 2) + 1) + self.qkv * (3 if count > 1 else 1)) // count
            if self.batch.shared:  # each call's output, and the whole output
                group = max(group, (self.qkv + self.kv + 2 * self.q) // count + self.q * (count > 1))
            group += self.cast if count > 1 else chunk * shape.hidden  # groups share the normed input
            group += setup.decoded(shape.hidden * (shape.q + 2 * shape.kv))
            yield Alive("attention", attention=group, norms=held)
            chunks = chunk * (2 * shape.mlp + shape.hidden + (shape.q if count > 1 else 0))
            chunks += setup.decoded(shape.mlp_parameters + shape.hidden * shape.q)
            yield Alive("MLP", attention=self.q, mlp=chunks, norms=held + self.hidden)
            return
        norm, normed = self.norm(shape.hidden, stream=True).evaluated, self.hidden * shape.arch.norm_before
        yield Alive("attention", attention=self._evaluated_attention(), norms=held + normed)
        yield Alive("norm", norms=held + self.hidden * (1 + shape.arch.norm_after) + norm)
        yield Alive("MLP", mlp=self._mlp(self.tiled_mlp).evaluated, norms=held + self.hidden + normed)

    def _evaluated_attention(self) -> int:
        """Returns the bytes of attention in a forward without autograd: the maximum over its output projection, the
        exchange with other GPUs, its rotary embedding and the norms of heads."""
        arch, setup, size = self.shape.arch, self.setup, self.setup.bytes
        q, kv = (self.tokens * width * size for width in (self.shape.q, self.shape.kv))
        rotated = (q + kv) * setup.weight_bytes // size + kv  # queries and keys in float32 under autocast
        output = rotated + self.q + max(self.lse, self.cast + self._added(self.shape.q, self.shape.hidden))
        output = max(output, rotated + self.q + self.repeated + self.squares.evaluated)
        sent = rotated + self.qkv + 2 * self.q + q if setup.sequence_parallel > 1 else 0
        if self.batch.shared:
            output = max(output, rotated + (self.qkv if sent else 0) + 2 * self.q)
        if setup.liger:
            return max(output, sent)
        wide = FLOAT // size if setup.autocast or arch.norm == "layer" or arch.head_norm == "own" else 1
        rotary = (rotated if arch.head_norm else q + 2 * kv) + wide * (3 * q + (q + kv) * (arch.norm == "layer"))
        head_norms = self.norm(self.shape.q).evaluated + q + 2 * kv * (arch.norm != "rms") if arch.head_norm else 0
        return max(output + (q + kv if "qkv" in arch.merged else 0), sent, rotary, head_norms)

    def _added(self, width: int, out: int) -> int:
        """Returns the bytes of an adapter's float32 input of this width, and twice those of its output of `out`
        elements."""
        added = 2 * out * (self.setup.bytes if self.setup.autocast else FLOAT)
        return 0 if self.setup.full else self.tokens * (added + width * FLOAT * (self.setup.bytes < FLOAT))

    def inputs(self, count: int) -> int:
        """Returns the bytes that `count` projections of the same hidden states save of them: under autocast one copy
        each, unless they are frozen."""
        return count * self.cast * self.setup.full if self.setup.autocast else self.hidden

    def _mlp(self, chunked: bool) -> ModuleBytes:
        """Returns the bytes of the MLP: gate, up, their product, and the activation unless Liger recomputes it. In
        chunks: these of one chunk, weight gradients summed in float32, their rounded copies, the gradient of the input,
        and that of the output if it is another tensor. For a layer tiled as a whole see `_tiled`."""
        arch, shape, setup = self.shape.arch, self.shape, self.setup
        rows = self.mlp_chunk if chunked else self.tokens
        inner = rows * shape.mlp * setup.bytes
        sums = self._sums(3 * shape.hidden * shape.mlp * max(shape.experts, 1)) if chunked else 0
        if shape.experts:  # the sums start when the first chunk is differentiated
            later = sums + self._experts(min(rows, self.tokens - rows) * shape.experts_per_token) if chunked else 0
            weighted = setup.bytes + (FLOAT if arch.float32_routing else setup.bytes)
            a_pair = max((4 * shape.mlp + shape.hidden) * setup.bytes, 2 * shape.hidden * weighted)
            evaluated = rows * shape.experts_per_token * a_pair + self.hidden * chunked
            return ModuleBytes(0, max(self._experts(rows * shape.experts_per_token), later) + self.hidden, evaluated)
        if chunked:
            outer = self.cast * (1 + setup.autocast) + setup.decoded(3 * shape.hidden * shape.mlp)
            after = 0 if setup.autocast else self.cast * arch.norm_after
            return ModuleBytes(0, 3 * inner + sums + self._rounded(sums) + outer + after, 2 * inner + outer)
        adapters = (1 if "gate_up" in arch.merged else 2) * self._adapter(shape.hidden) + self._adapter(shape.mlp)
        kept = inner * (3 if setup.liger else 4) + adapters + setup.cast(3 * shape.hidden * shape.mlp)
        more = inner * (1 if setup.liger and setup.full else 2)  # Liger overwrites kept tensors
        if setup.autocast and not setup.full:  # the recomputation of down with its adapter is the peak
            more += self.hidden + 3 * self.cast
        merged = "gate_up" in arch.merged
        evaluated = inner * (3 + (merged and not setup.liger)) - setup.full * setup.cast(shape.hidden * shape.mlp)
        adapted = 0 if setup.full else 2 * inner + self._added(shape.hidden, shape.mlp * (1 + merged))
        return ModuleBytes(kept, kept + more, max(evaluated, adapted))

    def _experts(self, pairs: int) -> int:
        """Returns the bytes of `pairs` pairs of a token and an expert: the maximum over three moments of Hugging Face's
        grouped products."""
        shape, d, m, size = self.shape, self.shape.hidden, self.shape.mlp, self.setup.bytes
        weighted = FLOAT if shape.arch.float32_routing else size
        weights = 3 * d * m * shape.experts * size if self.setup.full else 0
        return max(
            pairs * (4 * m * size + d * (2 * size + 3 * weighted)),
            pairs * (5 * m + 3 * d) * size + weights // 3,
            pairs * (2 * m + 2 * d) * size + weights,
        )

    def _adapter(self, width: int) -> int:
        """Returns the bytes that a projection's adapter saves of an input of this width: a copy, in float32 unless
        under autocast."""
        copied = not self.setup.full and self.setup.bytes < FLOAT
        return copied * self.tokens * width * (self.setup.bytes if self.setup.autocast else FLOAT)

    def _sums(self, parameters: int) -> int:
        """Returns the bytes of these parameters' float32 gradients, summed over chunks."""
        return parameters * FLOAT if self.setup.full else 0

    def _rounded(self, sums: int) -> int:
        """Returns the bytes of the rounded copy of such sums, 0 if they need none."""
        return sums // FLOAT * self.setup.bytes if self.setup.weight_bytes < FLOAT else 0
