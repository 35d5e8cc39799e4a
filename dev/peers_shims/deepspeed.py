"""DeepSpeed's tests of tiled compute and of Ulysses: `tiled` and `sp` are seqtile's.

The helpers that its tests import from `unit` are stood in for: a test runs in as many processes as its class asks for.
"""

import contextlib
import functools
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
import transformers
from deepspeed.runtime.sequence_parallel import ulysses_sp

import seqtile
from seqtile import sp

SECONDS = 240  # for a test; more than enough, unless processes wait for each other


class TiledMLP:
    @staticmethod
    def apply(
        fn: Callable, module: torch.nn.Module, x: torch.Tensor, shards: int, params: list[torch.Tensor]
    ) -> torch.Tensor:
        chunk_tokens = -(-x.shape[:-1].numel() // shards)
        return seqtile.tiled(functools.partial(fn, module), x, params=params, chunk_tokens=chunk_tokens)


def sequence_tiled_compute(
    fn: Callable,
    seqlen: int,
    shards: int,
    kwargs_to_shard: dict[str, torch.Tensor],
    kwargs_to_pass: dict[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: list[torch.Tensor],
    **unused: object,
) -> torch.Tensor:
    names, tensors = zip(*kwargs_to_shard.items(), strict=True)

    def of_tile(*pieces: torch.Tensor) -> torch.Tensor:
        return fn(**dict(zip(names, pieces, strict=True)), **kwargs_to_pass)

    chunk_tokens = -(-tensors[0].shape[:-1].numel() // shards)
    return seqtile.tiled(of_tile, *tensors, params=compute_params, chunk_tokens=chunk_tokens)


class TiledLoss:
    """Of logits that are there: seqtile has no such loss, but tiles any function of tokens."""

    @staticmethod
    def apply(
        loss_fn: Callable, logits: torch.Tensor, vocab_size: int, shift_labels: torch.Tensor, shards: int
    ) -> torch.Tensor:
        def of_tile(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)

        tiles = seqtile.tiled(of_tile, logits, shift_labels[..., None], chunk_tokens=logits.shape[1] // shards)
        return tiles.sum() / (shift_labels != -100).sum()


class Ulysses:
    """DeepSpeed makes the groups; the next model that is loaded is spread over them by seqtile."""

    ctx: sp.SequenceParallel | None = None

    @classmethod
    def register_with_transformers(cls, model_name_or_path: str, sequence_parallel_size: int, **unused: object) -> Any:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=sequence_parallel_size)
        cls.ctx = sp.initialize(group=parallel_state_sp.get_sequence_parallel_group())
        return parallel_state_sp


class TinyLlama:
    """In the place of a model from a hub."""

    @staticmethod
    def from_pretrained(name: str) -> transformers.LlamaForCausalLM:
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **shape)).train()
        if Ulysses.ctx is not None:
            sp.apply_ulysses(model, Ulysses.ctx)
        return model


def sharded(loader: torch.utils.data.DataLoader, device: torch.device, **unused: object) -> sp.ShardedDataLoader:
    return sp.ShardedDataLoader(loader, Ulysses.ctx, device)


class DistributedTest:
    """Runs each test of a subclass in `world_size` processes."""

    world_size = 2

    def __init_subclass__(cls) -> None:
        for name, test in list(vars(cls).items()):
            if name.startswith("test_"):
                setattr(cls, name, in_processes(test, cls.world_size))


def in_processes(test: Callable, world_size: int) -> Callable:
    @functools.wraps(test)
    def run(self: object, **arguments: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            context = torch.multiprocessing.get_context("fork")
            given = (test, self, arguments, world_size, folder)
            processes = [context.Process(target=one_process, args=(rank, *given)) for rank in range(world_size)]
            for process in processes:
                process.start()
            for process in processes:
                process.join(SECONDS)
            codes = [process.exitcode for process in processes]
            for process in processes:
                process.kill()
                process.join()
            errors = sorted(Path(folder).glob("error-*"))
            assert not errors, errors[0].read_text()
            assert codes == [0] * world_size, f"exit codes {codes}; None: not done after {SECONDS} s"

    return run


def one_process(rank: int, test: Callable, of: object, arguments: dict, world_size: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
        deepspeed.init_distributed("gloo")
        test(of, **arguments)
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        Path(folder, f"error-{rank}").write_text(f"{type(error).__name__}: {error} ({place})")
        os._exit(1)
    os._exit(0)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, **options: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, **options)


def assert_dicts_equal(actual: dict, expected: dict, **options: object) -> None:
    for name in expected:  # seqtile's shards hold more
        assert_equal(actual[name], expected[name], **options)


class CaptureStderr(contextlib.redirect_stderr):
    def __init__(self) -> None:
        super().__init__(io.StringIO())

    def __enter__(self) -> "CaptureStderr":
        super().__enter__()
        return self

    @property
    def err(self) -> str:
        return self._new_target.getvalue()


def install(mode: str) -> None:
    """The modules `unit`; an Adam and collectives that need no compiler."""
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    common, util = ModuleType("unit.common"), ModuleType("unit.util")
    common.DistributedTest, common.preferred_dtype = DistributedTest, lambda: torch.float32
    util.torch_assert_equal, util.torch_assert_close = assert_equal, torch.testing.assert_close
    util.torch_assert_dicts_of_tensors_equal, util.CaptureStderr = assert_dicts_equal, CaptureStderr
    sys.modules |= {"unit": ModuleType("unit"), common.__name__: common, util.__name__: util}
    ulysses_sp.TiledLoss = TiledLoss  # younger than this DeepSpeed
    initialize = deepspeed.initialize

    def initialize_on_cpu(config: dict, **options: object) -> tuple:
        optimizer = config["optimizer"]
        params = optimizer["params"] | {"torch_adam": True}
        return initialize(config=config | {"optimizer": optimizer | {"params": params}}, **options)

    deepspeed.initialize = initialize_on_cpu


REPLACED = {
    "test_tiled_compute": {"TiledMLP": TiledMLP, "sequence_tiled_compute": sequence_tiled_compute},
    "test_ulysses_sp_hf": {
        "UlyssesSPAttentionHF": Ulysses,
        "UlyssesSPDataLoaderAdapter": sharded,
        "AutoModelForCausalLM": TinyLlama,
    },
}
LEFT_OUT = [
    ("test_disable_in_eval|with_peft_model", "a test of how DeepSpeed registers its attention"),
]
KNOWN = [
    ("sharded over ranks", "refused by design: under ZeRO-3 every tile would gather the parameters"),
]
