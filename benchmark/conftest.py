import pytest
from benchmark.contestants import DEVICE, cases


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--size", default=None, choices=["smoke", "cpu", "cuda"], help="default: by the device")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"shape", "tokens"} <= set(metafunc.fixturenames):
        size = metafunc.config.getoption("--size") or DEVICE
        metafunc.parametrize(("shape", "tokens"), cases(size, getattr(metafunc.module, "LENGTHS", {})))
