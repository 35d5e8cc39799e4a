"""How tensors get to host memory and back: on a side stream of a GPU, or at once where there is none.

Both directions use one stream, so a block that is given back while it is still read or written is safe to reuse.
"""

from typing import Any, Protocol

import torch


class Copies(Protocol):
    """A copy is told to be awaited by whoever computes next, never by the host."""

    def out(self, tensor: torch.Tensor, block: torch.Tensor) -> Any:
        """Begins to copy `tensor` into `block`, which has its shape and dtype. Returns what `wait` takes."""

    def back(self, block: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begins to copy `block` into a new tensor."""

    def wait(self, copied: Any) -> None:
        """What is computed from now on comes after the copy."""

    def abandon(self, tensor: torch.Tensor) -> None:
        """A tensor that may still be copied is let go of, anywhere: its memory is free for others after the copy."""


class AtOnce:
    """Plain copies: for tests, of a store without a device."""

    def out(self, tensor: torch.Tensor, block: torch.Tensor) -> None:
        block.copy_(tensor)

    def back(self, block: torch.Tensor) -> tuple[torch.Tensor, None]:
        return block.clone(), None

    def wait(self, copied: None) -> None:
        pass

    def abandon(self, tensor: torch.Tensor) -> None:
        pass


class OnSideStream:
    """Asynchronous copies between pinned memory and one GPU."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def out(self, tensor: torch.Tensor, block: torch.Tensor) -> torch.cuda.Event:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            block.copy_(tensor, non_blocking=True)
            return self.stream.record_event()

    def back(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        tensor = torch.empty(block.shape, dtype=block.dtype, device=self.device)  # of the computing stream's memory
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still use it
        with torch.cuda.stream(self.stream):
            tensor.copy_(block, non_blocking=True)
            return tensor, self.stream.record_event()

    def wait(self, copied: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(copied)

    def abandon(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.stream)
