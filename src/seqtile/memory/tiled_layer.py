"""A layer that is tiled as a whole, moment by moment: only attention has the length of the sequence.

The lists follow `seqtile.ops.decoder_layer`. With groups of heads, queries, keys, values, their gradients and workspace
exist for one group at a time; attention's output is kept of all, and let go of group by group.
"""

from seqtile.memory.layer import FLOAT, Layer, Working, chunk_tokens
from seqtile.memory.setup import Setup
from seqtile.memory.shape import TILED_WHOLE, Shape

AUTO_GROUPS = 8  # as in seqtile.models.layer, which needs torch


def layer_of(shape: Shape, setup: Setup, tokens: int) -> Layer:
    """One layer, `tokens` of it on this GPU: as `setup` tiles it, if they are more than a tile."""
    whole = "layer" in setup.tiles and tokens > chunk_tokens(shape, setup)
    return (TiledLayer if whole else Layer)(shape, setup, tokens)


def groups_of(shape: Shape, setup: Setup) -> int | None:
    """How many groups of kv heads; None if all attend at once. ValueError for a number that does not divide them."""
    groups, heads, ranks = setup.head_groups, shape.kv_heads, setup.sequence_parallel
    if groups == "auto":
        many = [count for count in range(2, AUTO_GROUPS + 1) if heads % count == 0 and heads // count >= ranks]
        return max(many, default=None)
    if groups is not None and heads % groups:
        raise ValueError(f"head_groups: expected a divisor of the {heads} kv heads, got {groups}")
    if groups is not None and ranks > 1 and heads // groups < ranks:
        raise ValueError(
            f"head_groups: expected at most {heads // ranks} groups, so that each of the {ranks} GPUs that share a "
            f"sequence has a kv head of its own in every group, got {groups}; more are not planned"
        )
    return groups


def check_layer(shape: Shape, setup: Setup) -> None:
    """Raises ValueError if the layers of this model are not tiled as `setup` says."""
    if "layer" in setup.tiles and not shape.tiles_whole:
        kind = shape.model_type if shape.inside is None else f"{shape.model_type} in {shape.inside}"
        raise ValueError(
            f"model type {kind}: its layers are not tiled as a whole; expected one of {', '.join(TILED_WHOLE)}, or "
            "tiles without layer"
        )
    groups_of(shape, setup)


class TiledLayer(Layer):
    """Everything but attention by tiles, attention by `groups` of heads."""

    def __init__(self, shape: Shape, setup: Setup, tokens: int):
        super().__init__(shape, setup, tokens)
        self.groups = groups_of(shape, setup)
        self.rows = chunk_tokens(shape, setup)

    def moments(self) -> list[Working]:
        """In the order of the backward. The gradient of what the MLP's part begins with is alive throughout, from the
        first group on also that of what is projected."""
        shape, hidden, count = self.shape, self.hidden, self.groups or 1
        q, kv, _ = self._shares()
        kept = q + self._lse()  # of attention's output, by all groups
        after, before = shape.mlp_parameters + shape.hidden * shape.q, shape.hidden * (shape.q + 2 * shape.kv)
        sums = self._sums(before)
        group = (self._projected() + self._attention()) // count
        gradients = (self._raw() + q + 2 * kv) // count
        here, travelling = self._over_gpus(count)
        moments = [
            Working(
                "MLP", {"mlp": self._after_attention(), "attention": kept + self._waiting(), "norms": 2 * hidden}, 0
            )
        ]
        for past in range(min(count, 3)):  # groups that are through, the last first
            alive = kept - q * past // count + group + here * (count - 1 - past) // count
            alive += travelling * ((past > 0) + (past < count - 1))
            begun = past > (travelling > 0)  # on their way for one group longer
            parts = {"attention": alive + sums * begun, "norms": hidden * (1 + begun)}
            moments.append(Working("attention" + f", {past + 1} of {count} groups" * (count > 1), parts, after))
        rest = kept * (count - 1) // count
        parts = {"attention": rest + gradients + sums + self._projecting(count), "norms": 2 * hidden}
        moments.append(Working("projections", parts, after))
        parts = {"attention": sums + self._rounded(sums), "norms": 2 * hidden}
        moments.append(Working("norm before attention", parts, after))
        return moments

    def _over_gpus(self, count: int) -> tuple[int, int]:
        """Where GPUs share a sequence, in groups: attention's output for this one's tokens, of all groups; and what of
        a group is sent and arriving, queries, keys and values or their gradients."""
        if self.setup.sequence_parallel == 1 or self.groups is None:
            return 0, 0
        q, kv, _ = self._shares()
        return self.tokens * self.shape.q * self.setup.bytes, (2 * (q + 2 * kv) + self._raw()) // count

    def _waiting(self) -> int:
        """What waits besides while the MLP's backward runs: queries, keys and values, unless groups compute them again;
        where GPUs share a sequence, attention's output for this one's tokens."""
        q, kv, _ = self._shares()
        here = self.tokens * self.shape.q * self.setup.bytes if self.setup.sequence_parallel > 1 else 0
        return here + (q + 2 * kv if self.groups is None else 0)

    def _projected(self) -> int:
        """Queries, keys and values of all groups, while attention's backward runs."""
        q, kv, _ = self._shares()
        return q + 2 * kv + self._raw()

    def _raw(self) -> int:
        """Queries and keys before their norms, kept where they were computed again."""
        q, kv, _ = self._shares()
        return q + kv if self.groups is not None and self.shape.norms.of_heads else 0

    def _after_attention(self) -> int:
        """Sums of weight gradients, and tiles. Attention's output by groups is gathered for a tile. When all tiles are
        done, and gone, the sums are rounded."""
        shape, size = self.shape, self.setup.bytes
        gathered = self.rows * shape.q * size if (self.groups or 1) > 1 else 0
        tiles = 3 * self.rows * (shape.mlp + shape.hidden) * size + gathered
        sums = self._sums(shape.mlp_parameters)
        return sums + max(tiles, self._rounded(sums))

    def _projecting(self, groups: int) -> int:
        """In the backward of a group's projections: their weights side by side, sums of their gradients, tiles."""
        shape, size = self.shape, self.setup.bytes
        width = (shape.q + 2 * shape.kv) // groups
        weights = shape.hidden * width
        return weights * size + self._sums(weights) + self.rows * (shape.hidden + width) * size

    def _sums(self, parameters: int) -> int:
        """Of their gradients over tiles, in float32."""
        return parameters * FLOAT if self.trained else 0

    def _rounded(self, sums: int) -> int:
        """What such sums are rounded to, where that is a copy."""
        return sums // FLOAT * self.setup.bytes if self.setup.bytes < FLOAT else 0
