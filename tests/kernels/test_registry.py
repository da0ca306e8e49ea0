"""The registry decides which backend runs, and what is registered there is a backend."""

import sys
from types import ModuleType

import pytest
import torch

from kvtier_kernels import (
    KernelUnavailableError,
    SelectionKernels,
    available_kernels,
    get_kernels,
    selection_kernels,
)
from kvtier_kernels.reference_backend.kernels import ReferenceKernels
from kvtier_kernels.reference_backend.selection import ReferenceSelection
from kvtier_kernels.registry import AUTOMATIC, BACKENDS
from kvtier_kernels.scores import select, window_mass


class ZeroMass(ReferenceSelection):
    """A selection whose results can be told from any other's."""

    def window_mass(self, q, k, stretches, scale):
        return torch.zeros(q.shape[1], q.shape[0])


class Mine(ReferenceKernels):
    name = "mine"
    selection = ZeroMass()


def test_a_registered_backend_is_chosen_by_name_and_selects_where_it_is_automatic(monkeypatch):
    """One file, and one line in the registry."""
    module = ModuleType("my_backend")
    module.make_kernels = Mine
    monkeypatch.setitem(sys.modules, "my_backend", module)
    monkeypatch.setitem(BACKENDS, "mine", "my_backend:make_kernels")
    assert "mine" in available_kernels()
    assert isinstance(get_kernels("mine"), Mine)
    # Nothing chooses it by itself.
    assert get_kernels(device="cpu").name == "reference"
    q, k = torch.randn(6, 2, 1, 8), torch.randn(6, 2, 8)
    arguments = (q, k, [0, 6], [0], 0.3, 4)
    assert window_mass(*arguments).sum() > 0
    monkeypatch.setitem(AUTOMATIC, "cpu", "mine")
    assert get_kernels(device="cpu").name == "mine"
    assert not window_mass(*arguments).any()
    # The selection that a backend does not bring is torch's.
    assert select(torch.tensor([[3.0, 1.0, 2.0]]), 2).tolist() == [[0, 2]]


@pytest.mark.parametrize("name", available_kernels())
def test_every_backend_selects(name):
    try:
        kernels = get_kernels(name)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    assert isinstance(kernels.selection, SelectionKernels)
    assert kernels.name == name


def test_the_automatic_choice_is_where_the_tensors_are():
    assert get_kernels(device="cpu").name == "reference"
    assert get_kernels(device="cuda:1").name == "triton"
    assert selection_kernels(torch.device("cpu")) is selection_kernels(torch.device("cpu"))


def test_an_unknown_backend_lists_the_valid_ones():
    with pytest.raises(KernelUnavailableError, match="reference"):
        get_kernels("magic")
