"""What a projection must be for its weight to be read directly."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def check_plain_linear(name: str, module: nn.Module | None) -> None:
    """Raises ValueError unless `module` computes exactly x @ weight.T with a plain floating-point weight.

    An adapter or a quantised layer computes something else; FSDP2's subclass of nn.Linear does not, and may hold its
    weight sharded.
    """
    remedy = "apply to the plain model, before adapters or quantisation, or leave this part untiled (mlp/loss=False)"
    forward = getattr(type(module), "forward", None)
    if not isinstance(module, nn.Linear) or forward is not nn.Linear.forward or "forward" in vars(module):
        raise ValueError(f"{name} is a {_full_name(type(module))}, expected a plain torch.nn.Linear; {remedy}")
    if module.bias is not None:
        raise ValueError(f"{name} has a bias, which is not supported yet; leave this part untiled (mlp/loss=False)")
    weight = module.weight
    if type(weight) not in (torch.Tensor, nn.Parameter) and not isinstance(weight, DTensor):
        raise ValueError(f"{name}.weight is a {_full_name(type(weight))}, expected a plain tensor; {remedy}")
    if not weight.is_floating_point():
        raise ValueError(f"{name}.weight is {weight.dtype}, expected floating point; {remedy}")


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
