"""Protocols between subpackages that do not import each other: `models` and `ops` call what `sp` implements.

A tiled layer that computes attention in head chunks sends the next group between ranks while attention computes
this one. It needs attention in steps, rather than as the one call of Hugging Face's interface:

    registered function (SequenceParallelFunction)
        .steps(module, mask, heads, ...) -> SequenceParallelAttention, of all heads of a layer
            .in_groups(n)                -> SequenceParallelAttention, of a group of them

    forward      q, k, v --start_to_heads--> q, k, v --attend--> out --to_tokens--> out
    backward     dq, dk, dv <--start_gradients_to_tokens-- dq, dk, dv
                 all heads, this rank's tokens    this rank's heads, all tokens
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

SHARDED = "_seqtile_ulysses"
"""The attribute under which a model whose sequences are sharded over ranks, and each model inside it around its layers,
holds its `ShardedSequences`."""

LAYOUT = "ulysses_layout"
"""The keyword argument that tells the layers of such a model which tokens of the sequences a rank holds."""

CHOICE = "seqtile_choice"
"""The attribute of a forward that computes in several ways, of which each sends something else to other ranks: a
function that returns its module's way."""

FIRST_STEP = "_seqtile_first_step"
"""The attribute under which a model holds the `Outcome` of its first training step's comparison."""

OF_ALL_RANKS = "seqtile_of_all_ranks"
"""The attribute of an autograd Function whose output has values of tokens of all ranks, and is the same on each."""

PendingTensors = Callable[[], Sequence[Tensor]]
"""Waits for tensors that other ranks send, and returns them. To be called once."""


class Outcome(Protocol):
    """What came of comparing a model's first training step with the untiled model's."""

    compared: bool
    """False if it could not be compared."""

    def said(self, model: nn.Module) -> str:
        """Says what came of it, and whether the model has changed since."""


class ShardedSequences(Protocol):
    """The interface to a model's sequences that are sharded over ranks."""

    takes_whole: bool
    """True if the model gets the same whole batch on every rank, False if it gets each rank's part."""

    implementation: str
    """The name of the attention that computes a rank's heads: the model's own, or one chosen since."""

    def choose(self, implementation: str) -> None:
        """Sets that attention, between two forwards."""

    def other_batch(self, before: Callable[[], None]) -> AbstractContextManager[None]:
        """Returns a context in which forwards may take another batch than the running forward, and which calls `before`
        before each collective of theirs and of their backwards."""

    def add_layout(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments of the model below the head with the `LAYOUT` of the sequences of which they are this
        rank's part. A collective."""

    @property
    def shared_prefixes(self) -> tuple[int, int, int, str | None] | None:
        """The fewest tokens of a prefix that rows share, the tokens of the last batch, how many of them were saved, and
        if none, why; None if each row is computed by itself."""

    def sharers(self, groups: int = 1) -> int:
        """Returns how many ranks heads of attention are dealt to, all or those of a node, in so many groups."""

    def describe_ranks(self, groups: int) -> str | None:
        """Says how many ranks share a sequence, and what the layers send to other nodes, with attention by so many
        head chunks; None on one rank."""

    def stop_sharing_prefixes(self) -> None:
        """Computes every row of a batch by itself from now on."""

    def averaged(self, gradient: Tensor) -> Tensor:
        """Returns the mean of the gradients that the ranks have which share a sequence, as a reducer does."""


@runtime_checkable
class ShardedTokens(Protocol):
    """A tensor [..., K] of tokens of which each rank holds its own, [n, K]."""

    def each(self, function: Callable[..., Tensor], *along: Tensor) -> Tensor:
        """Returns function([n, K], ...), which computes each token by itself, as such a tensor; of `along` [..., *] it
        is given this rank's tokens, too."""

    def gradient(self, of_whole: Tensor) -> Tensor:
        """Returns a gradient of this tensor, plain and the same on every rank, as one whose tokens are over ranks."""

    def whole(self) -> Tensor:
        """Returns the values of all tokens, on every rank. One all-gather."""


@runtime_checkable
class SequenceParallelAttention(Protocol):
    """One call of attention whose ranks hold parts of the sequence, in steps."""

    @property
    def ranks(self) -> int:
        """The number of ranks to which heads are dealt."""

    def in_groups(self, groups: int) -> "SequenceParallelAttention":
        """Returns the steps for one of so many head chunks; `groups` divides the number of kv heads."""

    def start_to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> PendingTensors:
        """Sends q [B, H, S, K], k and v [B, KV, S, K] of this rank's S tokens; what arrives are q [B, h, rows, K], k
        and v [B, kv, length, K] of this rank's heads. Without gradients."""

    def start_gradients_to_tokens(self, *d_qkv: Tensor) -> PendingTensors:
        """Sends the gradients of what `start_to_heads` brought to the ranks that hold the tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Computes attention of this rank's heads, as `start_to_heads` brought them: [B, rows, h, K]."""

    def to_tokens(self, out: Tensor) -> Tensor:
        """Returns all heads of this rank's tokens [B, S, H, K] from each rank's `attend`. With gradients."""

    def agree_on_max(self, size: int) -> int:
        """Returns the largest of the ranks' sizes, so that all decide alike."""


@runtime_checkable
class SequenceParallelFunction(Protocol):
    """An attention function of Hugging Face's interface that can also be had in steps."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]: ...

    def steps(
        self, module: nn.Module, attention_mask: Any, heads: tuple[int, int], **options: Any
    ) -> SequenceParallelAttention | None:
        """Returns the steps of a call with these numbers of query heads and kv heads; `options` are those of a call.
        None if it is not over ranks."""
