"""What a function that runs a second time in the backward must find as it was in the forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from seqtile.ops.random_state import default_states, has_generator, set_default_states


class ForwardState(NamedTuple):
    """Autocast, and the states of torch's default random generators: of the CPU and of the device that computes."""

    device: torch.device
    autocast: dict[str, Any]
    random: list[torch.Tensor]

    @classmethod
    def now(cls, device: torch.device) -> "ForwardState":
        kind = "cpu" if device.type == "meta" else device.type  # nothing is cast on the meta device
        autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        return cls(device, autocast, default_states(device))

    def autocast_as_then(self) -> torch.autocast:
        """Casts are not cached: the graph of a cached one would serve one run only."""
        return torch.autocast(**self.autocast, cache_enabled=False)

    @contextmanager
    def random_as_then(self) -> Iterator[None]:
        """Random numbers from where the forward drew them; from where they are now, again, at the end."""
        devices = [self.device] if has_generator(self.device) else []
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            set_default_states(self.device, self.random)
            yield
