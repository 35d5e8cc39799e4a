"""What a rank sends to other ranks, by collective."""

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Arguments = dict[str, Any]


def size_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _all_to_all_single(given: Arguments, rank: int, ranks: int) -> int:
    tensor, splits = given["input"], given.get("input_split_sizes")
    own = size_of(tensor) * splits[rank] // sum(splits) if splits else size_of(tensor) // ranks
    return size_of(tensor) - own


def _all_to_all(given: Arguments, rank: int, ranks: int) -> int:
    tensors = given["input_tensor_list"]
    return size_of(*tensors) - size_of(tensors[rank])


def _scatter(given: Arguments, rank: int, ranks: int) -> int:
    tensors = given.get("scatter_list")
    return size_of(*tensors) - size_of(tensors[rank]) if tensors else 0  # only the source has any


# Of a function of torch.distributed: the collective, and the bytes that a rank sends others. An all-gather sends each
# of them its own part, a reduce-scatter each of them theirs, and an all-reduce is the one after the other.
COLLECTIVES: dict[str, tuple[str, Callable[[Arguments, int, int], int]]] = {
    "all_to_all_single": ("all_to_all", _all_to_all_single),
    "all_to_all": ("all_to_all", _all_to_all),
    "all_gather": ("all_gather", lambda given, rank, ranks: size_of(given["tensor"]) * (ranks - 1)),
    "all_gather_into_tensor": ("all_gather", lambda given, rank, ranks: size_of(given["input_tensor"]) * (ranks - 1)),
    "all_reduce": ("all_reduce", lambda given, rank, ranks: 2 * size_of(given["tensor"]) * (ranks - 1) // ranks),
    "reduce_scatter": (
        "reduce_scatter",
        lambda given, rank, ranks: size_of(*given["input_list"]) * (ranks - 1) // ranks,
    ),
    "scatter": ("scatter", _scatter),
}


class SentBytes:
    """Counts the collectives inside that this rank takes part in, and the bytes that it sends to other ranks.

    The functions of torch.distributed are counted, since they know splits and groups. At the end torch's profiler,
    which sees every collective that reaches a backend, on whatever way it came, has to have seen as many.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def __enter__(self) -> "SentBytes":
        self._functions = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, function in self._functions.items():
            setattr(dist, name, self._counted(function, *COLLECTIVES[name]))
        self._profiler.__enter__()
        return self

    def _counted(self, function: Callable, collective: str, sent: Callable[[Arguments, int, int], int]) -> Callable:
        signature = inspect.signature(function)

        def counted(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            group = given.get("group")
            self.calls[collective] += 1
            self.bytes[collective] += sent(given, dist.get_rank(group), dist.get_world_size(group))
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *exception: object) -> None:
        self._profiler.__exit__(*exception)
        for name, function in self._functions.items():
            setattr(dist, name, function)
        if exception[0] is None:
            seen = {event.key: event.count for event in self._profiler.key_averages() if event.key.startswith("c10d::")}
            assert sum(seen.values()) == self.calls.total(), f"counted {dict(self.calls)}, the profiler saw {seen}"
