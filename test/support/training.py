"""Parts of training steps on ranks: smaller weights, adapters, and an update by optimizer or DeepSpeed's engine."""

import torch
from torch import Tensor, nn


def halved(model: nn.Module) -> nn.Module:
    """Halves the weights, so that they are small enough for a learning rate of 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def with_lora(model: nn.Module, *targets: str, **options: object) -> nn.Module:
    """Returns the model with LoRA adapters that are not zero."""
    import peft

    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(targets), **options))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped


def update(wrapped: nn.Module, optimizer: object, loss: Tensor) -> None:
    """Runs backward and step, of DeepSpeed's engine or of an optimizer."""
    if wrapped is optimizer:
        wrapped.backward(loss)
        wrapped.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
