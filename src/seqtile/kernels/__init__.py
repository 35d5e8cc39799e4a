"""Row kernels: Triton programs, their launchers, and the same functions in plain PyTorch. No autograd here."""
