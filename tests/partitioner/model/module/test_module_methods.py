"""Every public method of ``torch.nn.Module``: on a partitioned model it does what it does on the model, or says why not.

A method that a later torch adds fails here until it is classified.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from passes.ir.errors import ConfigError
from tests.support.models.switched import switched
from tests.support.processes.module_cases import wrapped_in_ddp
from tests.support.processes.processes import Workers

SAME: dict[str, Callable[[Any], Any]] = {
    "buffers": lambda module: [buffer.shape for buffer in module.buffers()],
    "children": lambda module: [child.__class__ for child in module.children()],
    "cpu": lambda module: module.cpu() is module,
    "double": lambda module: module.double() is module,
    "eval": lambda module: [part.training for part in module.eval().modules()],
    "extra_repr": lambda module: module.norm.extra_repr(),
    "get_buffer": lambda module: module.get_buffer("norm.running_mean").shape,
    "get_parameter": lambda module: module.get_parameter("up.weight").shape,
    "get_submodule": lambda module: module.get_submodule("norm").eps,
    "load_state_dict": lambda module: module.load_state_dict(module.state_dict()),
    "modules": lambda module: [part.__class__ for part in list(module.modules())[1:]],
    "named_buffers": lambda module: [name for name, _ in module.named_buffers()],
    "named_children": lambda module: [name for name, _ in module.named_children()],
    "named_modules": lambda module: [name for name, _ in module.named_modules()],
    "named_parameters": lambda module: [(name, p.requires_grad) for name, p in module.named_parameters()],
    "parameters": lambda module: [p.shape for p in module.parameters()],
    "register_forward_hook": lambda module: module.register_forward_hook(print).remove(),
    "register_forward_pre_hook": lambda module: module.register_forward_pre_hook(print).remove(),
    "register_full_backward_hook": lambda module: module.register_full_backward_hook(print).remove(),
    "register_full_backward_pre_hook": lambda module: module.register_full_backward_pre_hook(print).remove(),
    "requires_grad_": lambda module: module.requires_grad_(True) is module,
    "share_memory": lambda module: module.share_memory().up.weight.is_shared(),
    "state_dict": lambda module: list(module.state_dict(prefix="x.")),
    "to": lambda module: module.to("cpu", torch.float64) is module,
    "train": lambda module: [part.training for part in module.train().modules()],
    "type": lambda module: module.up.type(torch.float64) is module.up,
    "zero_grad": lambda module: [p.grad for p in (module.zero_grad(), module)[1].parameters()],
}
"""Method -> a call that gives the same on both."""

REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "add_module": (lambda module: module.add_module("more", nn.ReLU()), "more cannot be set"),
    "apply": (lambda module: module.apply(print), r"apply\(fn\) would change"),
    "bfloat16": (lambda module: module.bfloat16(), "would become torch.bfloat16"),
    "float": (lambda module: module.float(), "would become torch.float32"),
    "half": (lambda module: module.half(), "would become torch.float16"),
    "register_buffer": (lambda module: module.register_buffer("more", torch.ones(1)), "more cannot be set"),
    "register_module": (lambda module: module.register_module("more", nn.ReLU()), "more cannot be set"),
    "register_parameter": (lambda module: module.register_parameter("more", None), "more cannot be set"),
    "set_submodule": (lambda module: module.set_submodule("up", nn.ReLU()), "up cannot be set"),
    "to_empty": (lambda module: module.to_empty(device="cpu"), "another tensor"),
}
"""Method -> a call that is refused on a partitioned model, and words of the error."""

ELSEWHERE = {
    "forward": "tests/end_to_end",
    "compile": "torch.compile of a partitioned model",
    "cuda": "as `to`: refused, or nothing to do on the device of the plan",
    "ipu": "as `to`",
    "mtia": "as `to`",
    "xpu": "as `to`",
    "get_extra_state": "raises on both: the model must define it",
    "set_extra_state": "raises on both: the model must define it",
    "register_backward_hook": "the old form of register_full_backward_hook; a module has one of both",
    "register_state_dict_post_hook": "state_dict() refuses: tests/partitioner/model/test_hooks.py",
    "register_state_dict_pre_hook": "state_dict() refuses: tests/partitioner/model/test_hooks.py",
    "register_load_state_dict_post_hook": "load_state_dict() refuses: tests/partitioner/model/test_hooks.py",
    "register_load_state_dict_pre_hook": "load_state_dict() refuses: tests/partitioner/model/test_hooks.py",
}
"""Method -> where it is tested, or what it is."""


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, PartitionedModel]:
    model, x = switched()
    return copy.deepcopy(model), partition(model, 2, "data", example_inputs=(x,), progress=False)


def test_every_method_is_in_one_table() -> None:
    public = {name: getattr(nn.Module, name) for name in dir(nn.Module) if not name.startswith("_")}
    methods = [name for name, value in public.items() if callable(value) and value.__module__.startswith("torch.")]  # transformers adds one
    decided = [*SAME, *REFUSED, *ELSEWHERE]
    assert sorted(decided) == sorted(methods)


@pytest.mark.parametrize("name", SAME)
def test_methods_that_do_the_same(pair: tuple[nn.Module, PartitionedModel], name: str) -> None:
    expected, found = map(SAME[name], pair)
    assert found == expected


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_are_refused(pair: tuple[nn.Module, PartitionedModel], name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words) as caught:
        call(pair[1])
    assert "remedy: " in str(caught.value)


def test_a_wrapper_that_would_copy_parameters_is_refused(pair: tuple[nn.Module, PartitionedModel]) -> None:
    _, pm = pair
    with pytest.raises(ConfigError, match="gives every process the parameters of the first"):
        nn.parallel.DistributedDataParallel(pm, process_group=cast(Any, object()))


@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_a_wrapper_around_a_part_of_a_module_is_refused(workers: Callable[[int], Workers]) -> None:
    """It copies parameters when it is made, and nothing asks the partitioned model: the first call is refused."""
    for said, distance in workers(2).values(wrapped_in_ddp, timeout=170):
        assert "gives every process the parameters of the first" in said
        assert "partitioner.integrations.lightning" in said
        assert distance < 1e-12


def test_second_derivatives_are_refused(pair: tuple[nn.Module, PartitionedModel]) -> None:
    _, pm = pair
    x = torch.randn(8, 6).double().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match="create_graph=True"):
            torch.autograd.grad(pm(x).sum(), x, create_graph=True)


def test_gradients_of_inputs_alone(pair: tuple[nn.Module, PartitionedModel]) -> None:
    """``torch.autograd.grad(loss, x)`` leaves ``.grad`` of parameters unchanged."""
    x = torch.randn(8, 6).double().requires_grad_()
    gradients: list[Tensor] = []
    for module in pair:
        module.zero_grad()
        torch.manual_seed(0)
        gradients += torch.autograd.grad(module(x).square().sum(), x)
        assert all(p.grad is None for p in module.parameters())
    torch.testing.assert_close(*gradients)


def test_backward_with_parameters_as_inputs(pair: tuple[nn.Module, PartitionedModel]) -> None:
    """``loss.backward(inputs=...)`` adds the gradients of all parameters; programs cannot compute those of a few."""
    model, pm = pair
    x = torch.randn(8, 6).double()
    for module in pair:
        module.zero_grad()
        torch.manual_seed(0)
        module(x).square().sum().backward(inputs=list(module.parameters()))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, expected[name])
    some = [parameter for parameter in pm.parameters() if parameter.requires_grad][:1]
    with pytest.raises(ConfigError, match=r"backward\(inputs=\.\.\.\) names 1 of \d+ parameters"):
        pm(x).sum().backward(inputs=some)


def test_gradients_are_cleared_as_on_the_model() -> None:
    model, x = switched()
    pm = partition(copy.deepcopy(model), 2, "data", example_inputs=(x,), progress=False)
    module: nn.Module
    for module in (model, pm):
        for to_none in (False, True):
            module(x).sum().backward()
            module.zero_grad(set_to_none=to_none)
            assert all((p.grad is None) if to_none else (p.grad is not None and not p.grad.any()) for p in module.parameters())
