"""States of generators of random numbers: torch's default ones, and any of torch, Python or numpy that is at hand."""

import pickle
import random
from typing import Any

import torch


def default_states(device: torch.device) -> list[torch.Tensor]:
    """Of the CPU's default generator and the device's, if it has one of its own."""
    states = [torch.get_rng_state()]
    if has_generator(device):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_default_states(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if has_generator(device):
        torch.get_device_module(device).set_rng_state(states[1], device)


def has_generator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


def is_generator(thing: Any) -> bool:
    """Whether it is a generator of torch, Python or numpy."""
    kind = type(thing)  # isinstance is slow with torch.Generator
    return torch.Generator in kind.__mro__ or issubclass(kind, random.Random) or hasattr(kind, "_bit_generator")


def state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator._bit_generator.state


def same_state(state: Any, other: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return state.tolist() == other.tolist()  # on the CPU, whatever the device; no operator, so also in a simulation
    return pickle.dumps(state) == pickle.dumps(other)


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator._bit_generator.state = state
