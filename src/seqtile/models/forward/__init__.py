"""The tiled forwards: of the loss, MLPs, experts, layers, norms and of the model below its head."""
