import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest

# The tests import torch, not this file: the process that waits for pytest-xdist's workers does not need it, and the
# workers start some seconds earlier.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", choices=["cpu", "cuda"], help="where kernels, ops and models run; cuda: nothing else"
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="every case, see support/choice.py",
    )
    parser.addoption("--repeat", type=int, default=1, help="call each test so often: is any of them lucky?")
    parser.addoption("--seed", type=int, help="of torch, for every test; fresh if not given")


def pytest_configure(config: pytest.Config) -> None:
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which logs what it could not load
        logging.getLogger(name).setLevel(logging.ERROR)
    draw_examples(100 if config.getoption("--full") else 20)
    if config.getoption("--device") == "cuda":
        from support.on_gpu import Failures, share_memory

        share_memory()
        config.pluginmanager.register(Failures(config))
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        os.nice(10)  # the first worker starts with the ranks, which wait for each other if one has no core


def draw_examples(number: int) -> None:
    """Sets how many inputs hypothesis draws for a test; every run draws new ones."""
    from hypothesis import HealthCheck, settings

    ignored = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    settings.register_profile("seqtile", max_examples=number, deadline=None, suppress_health_check=ignored)
    settings.load_profile("seqtile")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from support.choice import left_out, without_kernels
    from support.on_gpu import runs_on_gpu
    from support.tiny import broken_interpreter, interpreted

    on_gpu = config.getoption("--device") == "cuda"
    if not config.getoption("--full"):
        not_chosen = left_out(items, on_gpu, interpreted())
    else:
        not_chosen = without_kernels(items) if interpreted() else []
    leave_out(config, items, [item for item in not_chosen if not asked_for(config, item)])
    if on_gpu:
        leave_out(config, items, [item for item in items if not runs_on_gpu(item)])
    else:
        skip([item for item in items if "gpu" in item.keywords], "needs --device cuda")
    if interpreted() and (why := broken_interpreter()):
        skip(items, why)
    # One worker starts with all tests that use several ranks, so that no two of them wait for each other, see pool.py.
    items.sort(key=lambda item: "dist" not in item.keywords)


def pytest_collection_finish() -> None:
    gc.freeze()  # the garbage collector skips all objects that exist after import and collection


def skip(items: list[pytest.Item], why: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=why))


def asked_for(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether the user named a case by its id; such a case always runs."""
    return any(argument.endswith(item.nodeid) for argument in config.args)


def leave_out(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=left_out)
    gone = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in gone]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """With --repeat, calls a test several times. Each call continues torch's random state."""
    times = pyfuncitem.config.getoption("--repeat")
    if times == 1:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    failures = Counter()
    for _ in range(times):
        try:
            pyfuncitem.obj(**arguments)
        except AssertionError as failure:
            failures[str(failure).partition("\n")[0]] += 1
    assert not failures, f"{failures.total()} of {times} calls failed: {failures}"
    return True


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small models are slower on many threads."""
    import torch  # not imported in the process that only distributes tests

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pristine() -> Iterator[None]:
    """Removes seqtile and Liger from the classes after the test."""
    import seqtile
    from support.tiny import modeling_restored

    with modeling_restored():
        yield
        seqtile.restore()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator:
    """A `Pool` that is reused between tests, with as many ranks as the parameter says. If the parameter is a tuple, its
    other entries are the pool's `kind`: what its tests have in common."""
    from support.pool import Pool

    with Pool(*request.param) if isinstance(request.param, tuple) else Pool(request.param) as pool:
        yield pool


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """New inputs in every run. A failure's captured output shows the seed, and --seed repeats it."""
    import torch

    value = request.config.getoption("--seed")
    value = torch.seed() % 2**31 if value is None else value
    torch.manual_seed(value)
    print(f"--seed {value}")
