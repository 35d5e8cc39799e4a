"""The sequences of a step, and the tokens that it computes if they share a prefix, see `seqtile.share_prefixes`."""

from typing import NamedTuple


class Batch(NamedTuple):
    """Sequences of one length whose first `shared` tokens are equal and computed once."""

    rows: int
    seq_len: int
    shared: int
    gpus: int
    """GPUs that share the sequences."""

    @property
    def own(self) -> int:
        """Tokens of all sequences that are not shared."""
        return self.rows * (self.seq_len - self.shared)

    @property
    def tokens(self) -> int:
        """Tokens that one GPU computes."""
        if not self.shared:
            return -(-self.seq_len // self.gpus) * self.rows
        return -(-(self.shared + self.own) // self.gpus)

    @property
    def labelled(self) -> int:
        """Tokens with labels, on the GPU with most of them. Shared tokens have none."""
        return min(self.tokens, self.own) if self.shared else self.tokens

    def calls(self) -> list[tuple[int, int]]:
        """Returns the numbers of queries and keys of each FlashAttention call. The first call computes the shared
        tokens. Each further call takes as many sequences as possible without more keys than all calls together have
        queries."""
        most = self.tokens * self.gpus
        calls = [(self.shared, self.shared)]
        for _ in range(self.rows):
            queries, keys = calls[-1]
            if keys + self.seq_len > most:
                calls.append((0, 0))
                queries, keys = 0, 0
            calls[-1] = (queries + self.seq_len - self.shared, keys + self.seq_len)
        return calls
