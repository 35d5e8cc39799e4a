"""A decoder layer of Llama's shape as three autograd nodes: attention, an identity that saves, what follows."""
