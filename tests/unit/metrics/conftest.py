"""torch-uncertainty as the reference, loaded without the training framework its package imports."""

import importlib
import importlib.util
import sys
import types
import warnings

import pytest


def part_of_torch_uncertainty(name):
    """Import a module of version 0.12.1.

    Its top-level module imports a training framework that this part does not need, so an empty package with the
    same path stands in for it during the import.
    """
    spec = importlib.util.find_spec("torch_uncertainty")
    if spec is None:
        pytest.skip("torch-uncertainty, the referee, is not installed")
    package = types.ModuleType("torch_uncertainty")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["torch_uncertainty"] = package
    try:
        with warnings.catch_warnings(action="ignore"):
            try:
                return importlib.import_module(f"torch_uncertainty.{name}")
            except ImportError as error:
                pytest.skip(f"torch-uncertainty, the referee, cannot be imported: {error}")
    finally:
        del sys.modules["torch_uncertainty"]


@pytest.fixture(scope="session")
def referee():
    return part_of_torch_uncertainty("metrics.classification")


@pytest.fixture
def quiet():
    """Silence the reference libraries' warnings, which are not tested here."""
    with warnings.catch_warnings(action="ignore"):
        yield
