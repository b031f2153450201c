"""Every quick door leads to the operation that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.runtime.executor import BINDINGS

X = torch.rand(2, 3, 4, 4) + 0.5
M = torch.rand(3, 3)
V = torch.rand(3)

ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "add.Tensor": (X, X),
    "addmm": (V, M, M),
    "baddbmm": (M[None], M[None], M[None]),
    "bmm": (M[None], M[None]),
    "cat": ([X, X], 1),
    "clone": (X,),
    "convolution": (X, torch.rand(5, 3, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "div.Tensor": (X, X),
    "embedding": (M, torch.tensor([0, 2])),
    "expand": (V, [2, 3]),
    "mean.dim": (X, [1], True),
    "mm": (M, M),
    "mul.Tensor": (X, X),
    "native_batch_norm": (X, V, V, V.clone(), V.clone(), True, 0.1, 1e-5),
    "native_group_norm": (X, V, V, 2, 3, 16, 3, 1e-5),
    "native_layer_norm": (M, [3], V, V, 1e-5),
    "permute": (X, [0, 2, 3, 1]),
    "pow.Tensor_Scalar": (X, 2),
    "reshape": (X, [2, 48]),
    "select.int": (X, 1, 0),
    "stack": ([X, X], 1),
    "sub.Tensor": (X, X),
    "sum": (X,),
    "sum.dim_IntList": (X, [1], True),
    "t": (M,),
    "transpose.int": (X, 0, 1),
    "unbind.int": (X, 1),
    "unsqueeze": (X, 1),
    "view": (X, [2, 48]),
    "where.self": (X > 1, X, X),
}
"""Arguments as a traced graph passes them; one tensor for what is not listed."""


class Watch(TorchDispatchMode):
    """Records which operations are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("operation", "function"), BINDINGS.items(), ids=[str(operation) for operation in BINDINGS])
def test_function_dispatches_to_its_operation(operation: Any, function: Callable[..., Any]) -> None:
    name = str(operation).removeprefix("aten.").removesuffix(".default")
    arguments = ARGUMENTS.get(name, (X,))
    with torch.no_grad(), Watch() as watch:
        found = function(*arguments)
    with torch.no_grad(), Watch() as asked:
        expected = operation(*arguments)
    assert watch.seen == asked.seen
    assert watch.seen == [operation] or name == "reshape"  # a composition: what it comes to is asked of the operation itself
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple | list) else [(found, expected)]
    for one, other in pairs:
        assert isinstance(one, Tensor)
        assert torch.equal(one, other) or name == "native_batch_norm"


def test_every_listed_argument_is_used() -> None:
    names = {str(operation).removeprefix("aten.").removesuffix(".default") for operation in BINDINGS}
    assert set(ARGUMENTS) <= names
