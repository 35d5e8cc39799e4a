"""Mutants of checkpoints whose inputs wait in host memory."""

from mutants_list.mutant import Mutant

STORE = ("offload/test_store.py",)
CHECKPOINTING = ("offload/test_checkpointing.py",)

MUTANTS = (
    Mutant(
        "store: a tensor is let go of before its copy is out",
        "Store.settle",
        "                last.copies.wait(last.copied)\n",
        "",
        STORE,
    ),
    Mutant(
        "store: a tensor that was changed is taken for the same",
        "Store.put",
        "tensor.dtype, tensor.shape, tensor.stride(), tensor._version)",
        "tensor.dtype, tensor.shape, tensor.stride())",
        STORE,
    ),
    Mutant(
        "store: a change on the way out is not noticed",
        "Store.take",
        "if saved.changed or (saved.source is not None and saved.source._version != saved.version):",
        "if saved.changed or (saved.memory is None and saved.source._version != saved.version):",
        STORE,
    ),
    Mutant(
        "store: nothing is brought back before it is needed",
        "Store.take",
        "        self.prefetch(saved.before)\n",
        "",
        STORE,
    ),
    Mutant(
        "pool: what is returned still counts",
        "Pool._return",
        "self.total -= len(block)",
        "self.total -= 0",
        STORE,
    ),
    Mutant(
        "host memory: nothing is left to the machine",
        "available",
        "max(0, min(rooms) - KEPT_FREE)",
        "max(0, min(rooms))",
        STORE,
    ),
    Mutant(
        "host memory: a fork copies it",
        "mapped",
        '("MADV_HUGEPAGE", "MADV_DONTFORK")',
        '("MADV_HUGEPAGE",)',
        STORE,
    ),
    Mutant(
        "host memory: a forked process unmaps what is its own",
        "UnforkedMemory.__del__",
        "if getpid() != self.process:",
        "if getpid() == 0:",
        STORE,
    ),
    Mutant(
        "host memory: others do not see it as taken before it is registered",
        "mapped",
        "[:: mmap.PAGESIZE].zero_()",
        "",
        STORE,
    ),
    Mutant(
        "host memory: of two that come up short both give up",
        "mapped",
        "alone.enter_context(lock)",
        "pass",
        STORE,
    ),
    Mutant(
        "pool: a block is unregistered while it is copied",
        "Pool._return",
        "            copied.synchronize()\n",
        "            pass\n",
        STORE,
    ),
    Mutant(
        "store: another device overwrites a block that is still read",
        "Store.put",
        "                saved.copies.stream.wait_event(last)\n",
        "                pass\n",
        STORE,
    ),
    Mutant(
        "checkpoints: what is on a second GPU stays there",
        "Checkpoints._put",
        "elsewhere = tensor.device.type != self.store.copies.device.type",
        "elsewhere = tensor.device != self.store.copies.device",
        CHECKPOINTING,
    ),
    Mutant(
        "checkpoints: one layer too few is kept",
        "install",
        "kept=i >= len(layers) - keep_last",
        "kept=i > len(layers) - keep_last",
        CHECKPOINTING,
    ),
    Mutant(
        "checkpoints: host memory that is full is no error",
        "Checkpoints._put",
        "            if self.strict:\n",
        "            if self.strict is None:\n",
        CHECKPOINTING,
    ),
    Mutant(
        "checkpoints: a change of what stays is not noticed",
        "Store.take",
        "saved.source is not None and saved.source._version != saved.version",
        "saved.source is not None and saved.memory is not None and saved.source._version != saved.version",
        CHECKPOINTING,
    ),
    Mutant(
        "checkpoints: what is on another device is moved",
        "Checkpoints._put",
        "elsewhere = tensor.device.type != self.store.copies.device.type",
        "elsewhere = False",
        CHECKPOINTING,
    ),
)
