"""A mode without data for steps whose control flow depends on ids."""

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from seqtile.memory.measure import tensors_of


class KnownIntegers(FakeTensorMode):
    """A fake mode in which integer tensors have data, and floating-point tensors have none."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = tensors_of((args, kwargs))
        if given and not any(isinstance(x, FakeTensor) or x.is_floating_point() or x.is_meta for x in given):
            return func(*args, **(kwargs or {}))
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if given or any(x.is_floating_point() for x in tensors_of(found)):
            return found
        return func(*args, **(kwargs or {}))
