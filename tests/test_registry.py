"""The contract is checked when a backend is offered, and when it builds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import mla_index
from mla_index import registry
from mla_index.registry import CONTRACT_VERSION, Kernel, Limits


def backend(**changes):
    fields = {
        "name": "mine",
        "contract_version": CONTRACT_VERSION,
        "limits": Limits(("remap",), ("cpu",)),
        "unavailable": lambda device, *, probe: None,
        "unsupported": lambda op, spec: None,
        "build": lambda op, spec, device: Kernel(lambda *tensors: None),
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": "Mine"}, "name must match"),
        ({"name": "auto"}, "not be 'auto'"),
        ({"name": None}, "got None"),
        ({"contract_version": 99}, "contract_version must be 1, got 99"),
        ({"contract_version": True}, "contract_version must be 1, got True"),
        ({"limits": {"operations": ()}}, "limits must be a mla_index.registry.Limits, got dict"),
        ({"limits": Limits(("remapp",), None)}, "names 'remapp'; there are remap, safe_lengths"),
        ({"limits": Limits((), None)}, "limits.operations is empty"),
        ({"limits": Limits(("remap",), None, (torch.int8,))}, "limits.dtypes must be among"),
        ({"unavailable": lambda device: None}, "unavailable(device) cannot be called as"),
        ({"unsupported": None}, "unsupported must be callable, got NoneType"),
        ({"build": lambda spec: None}, "build(spec) cannot be called as (op, spec, device)"),
    ],
)
def test_each_breach_is_named(changes, told):
    with pytest.raises(mla_index.InvalidBackend) as caught:
        mla_index.register(backend(**changes))
    assert told in str(caught.value)


def test_every_breach_is_listed_at_once():
    with pytest.raises(mla_index.InvalidBackend) as caught:
        mla_index.register(SimpleNamespace())
    assert str(caught.value).startswith("SimpleNamespace is no backend: ")
    for part in ("name", "contract_version", "limits", "unavailable", "unsupported", "build"):
        assert part in str(caught.value)


def test_a_name_is_taken_once():
    mla_index.register(backend())
    with pytest.raises(ValueError, match="'mine' exists"):
        mla_index.register(backend())
    with pytest.raises(ValueError, match="'torch' is the name of a built-in"):
        mla_index.register(backend(name="torch"))
    mla_index.unregister("mine")
    mla_index.register(backend())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"operations": None, "devices": None}, "operations must be a tuple of str, got None"),
        ({"operations": ("remap",), "devices": "cpu"}, "devices must be a tuple of str, got 'cpu'"),
        ({"operations": ("remap",), "devices": (1,)}, "devices must be a tuple of str"),
        ({"operations": ("remap",), "devices": None, "dtypes": None}, "dtypes must be a tuple"),
        ({"operations": ("remap",), "devices": None, "max_topk": "5"}, "max_topk must be an int"),
        ({"operations": ("remap",), "devices": None, "max_topk": 3}, "power of two, got 3"),
    ],
)
def test_limits_are_checked_when_they_are_made(fields, told):
    with pytest.raises((TypeError, ValueError), match=told):
        Limits(**fields)


@pytest.mark.parametrize("name", ["torch", "nobody"])
def test_only_what_was_registered_is_taken_back(name):
    with pytest.raises(mla_index.UnknownBackend, match="was not registered"):
        mla_index.unregister(name)


def test_a_backend_of_the_same_name_replaces_what_was_kept_of_the_first():
    def marking(mark):
        def launch(req_id, block_table, token_indices, out, *rest):
            out.fill_(mark)

        return backend(build=lambda op, spec, device: Kernel(launch))

    table = torch.zeros((1, 1), dtype=torch.int32)
    slots = []
    for mark in (1, 2):
        mla_index.register(marking(mark))
        result = mla_index.remap(None, table, table, block_size=64, backend="mine")
        slots.append(int(result.slots))
        mla_index.unregister("mine")
    assert slots == [1, 2]


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda op, spec, device: print, "must return a mla_index.registry.Kernel"),
        (lambda op, spec, device: Kernel(lambda a, b: None), "launcher of remap"),
        (lambda op, spec, device: Kernel(lambda *a: None, warm=3), "warm must be callable"),
    ],
)
def test_what_is_built_is_checked(build, told):
    mla_index.register(backend(build=build))
    table = torch.zeros((1, 1), dtype=torch.int32)
    with pytest.raises(mla_index.InvalidBackend, match=told):
        mla_index.remap(None, table, table, block_size=64, backend="mine")


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_the_built_in_declarations_keep_the_contract(name):
    assert registry.contract_faults(registry.load(name)) == []
    assert registry.load(name).name == name


def test_the_kernel_of_torch_keeps_the_contract():
    torch_backend = registry.load("torch")
    cpu = torch.device("cpu")
    for op, spec in (
        ("remap", mla_index.RemapSpec(64, 2048)),
        ("safe_lengths", mla_index.SafeLengthsSpec()),
        ("flat_row_view", None),
    ):
        built = torch_backend.build(op, spec, cpu)
        assert registry.check_kernel(torch_backend, op, built) is built
