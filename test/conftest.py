import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="where kernels, ops and models run")
    parser.addoption("--seed", type=int, help="of torch, for every test; fresh if not given")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") != "cuda":
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs --device cuda"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Fresh inputs in every run; the seed is in the captured output of a failure, and --seed repeats it."""
    value = request.config.getoption("--seed")
    value = torch.seed() % 2**31 if value is None else value
    torch.manual_seed(value)
    print(f"--seed {value}")
