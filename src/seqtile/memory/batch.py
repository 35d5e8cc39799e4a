"""The sequences of a step, and the tokens that it computes if they share a prefix, see `seqtile.share_prefixes`."""

from typing import NamedTuple


class Batch(NamedTuple):
    """Sequences of one length, the first `shared` tokens of which are the same in all and computed once."""

    rows: int
    seq_len: int
    shared: int
    gpus: int
    """GPUs that share the sequences."""

    @property
    def own(self) -> int:
        """Tokens that are not shared, of all sequences."""
        return self.rows * (self.seq_len - self.shared)

    @property
    def tokens(self) -> int:
        """Tokens that a GPU computes."""
        if not self.shared:
            return -(-self.seq_len // self.gpus) * self.rows
        return -(-(self.shared + self.own) // self.gpus)

    @property
    def given(self) -> int:
        """Tokens of the sequences as the model is given them."""
        return self.rows * self.seq_len

    @property
    def labelled(self) -> int:
        """Tokens that have labels, on the GPU with most of them: of what sequences share, none."""
        return min(self.tokens, self.own) if self.shared else self.tokens

    def calls(self) -> list[tuple[int, int]]:
        """Returns the tokens of queries, and of keys, of each call of FlashAttention: what sequences share, then one
        after the other, as many to a call as leave it no more keys than all calls have queries."""
        most = self.tokens * self.gpus
        found = [(self.shared, self.shared)]
        for _ in range(self.rows):
            queries, keys = found[-1]
            if keys + self.seq_len > most:
                found.append((0, 0))
                queries, keys = 0, 0
            found[-1] = (queries + self.seq_len - self.shared, keys + self.seq_len)
        return found
