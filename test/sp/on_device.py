"""A tensor that counts how often the host would wait for its device."""

from typing import Any

import torch

WAITS = ("cpu", "tolist", "item", "nonzero", "__bool__", "__int__", "__index__", "__float__")


class OnDevice(torch.Tensor):
    """Counts operations that would wait for a device; `cpu` moves it to the host, where nothing waits."""

    waits = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = super().__torch_function__(function, types, args, kwargs)
        if function in [getattr(torch.Tensor, name) for name in WAITS]:
            OnDevice.waits += 1
        return found.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else found
