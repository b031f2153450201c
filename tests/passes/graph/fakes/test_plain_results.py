"""Results that are read off a call on fake tensors are those that PyTorch finds by decomposing the operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_impls import get_fast_op_impls
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from passes.graph.fakes.plain_results import PLAIN_RESULTS
from passes.graph.symbolic_sizes import traced_size
from passes.ir.torch_private import FakeTensorMode, fake_results_by

aten = torch.ops.aten

Arguments: TypeAlias = Callable[[Any, Any], tuple[Any, ...]]
"""The arguments of a call, by two open sizes: rows and a length."""


def empty(*sizes: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype)


CALLS: dict[str, tuple[Any, Arguments]] = {
    "group norm": (aten.native_group_norm.default, lambda s, _: (empty(s, 8, 4, 4), empty(8), empty(8), s, 8, 16, 2, 1e-5)),
    "group norm of vectors": (aten.native_group_norm.default, lambda s, _: (empty(s, 8), None, None, s, 8, 1, 4, 1e-5)),
    "group norm, no bias": (aten.native_group_norm.default, lambda s, t: (empty(s, 6, t), empty(6), None, s, 6, t, 3, 1e-5)),
    "group norm, channels last": (
        aten.native_group_norm.default,
        lambda s, _: (empty(s, 4, 5, 8).permute(0, 3, 1, 2), empty(8), empty(8), s, 8, 20, 2, 1e-5),
    ),
    "layer norm": (aten.native_layer_norm.default, lambda s, t: (empty(s, t, 8), [8], empty(8), empty(8), 1e-5)),
    "layer norm of two dimensions": (aten.native_layer_norm.default, lambda s, _: (empty(s, 3, 8), [3, 8], None, None, 1e-5)),
    "layer norm, permuted": (aten.native_layer_norm.default, lambda s, _: (empty(s, 7, 8).transpose(1, 2), [7], empty(7), None, 1e-5)),
    "dropout": (aten.native_dropout.default, lambda s, t: (empty(s, t, 8), 0.1, True)),
    "dropout, permuted": (aten.native_dropout.default, lambda s, _: (empty(s, 7, 8).transpose(0, 1), 0.1, True)),
    "gelu": (aten.gelu.default, lambda s, t: (empty(s, t, 8, dtype=torch.bfloat16),)),
    "gelu, permuted": (aten.gelu.default, lambda s, _: (empty(s, 7, 8).permute(2, 0, 1),)),
    "relu": (aten.relu.default, lambda s, _: (empty(s, 7, dtype=torch.float64),)),
    "silu": (aten.silu.default, lambda s, _: (empty(s, 3, 4, 5).permute(0, 2, 3, 1),)),
    "sigmoid": (aten.sigmoid.default, lambda s, _: (empty(s, 7),)),
    "tanh": (aten.tanh.default, lambda s, _: (empty(s, 7),)),
    "mul by an integer": (aten.mul.Scalar, lambda s, _: (empty(s, 7, dtype=torch.bfloat16), 2)),
    "mul by a float": (aten.mul.Scalar, lambda s, _: (empty(s, 7), 0.125)),
    "softmax": (aten._softmax.default, lambda s, t: (empty(s, t, 8), -1, False)),
    "softmax over rows": (aten._softmax.default, lambda s, _: (empty(s, 7, 8), 0, False)),
    "safe softmax": (aten._safe_softmax.default, lambda s, t: (empty(s, 2, t, t), -1)),
    "addmm": (aten.addmm.default, lambda s, _: (empty(5), empty(s * 7, 8), empty(5, 8).t())),
}

VIEWS: dict[str, Arguments] = {
    "split": lambda s, _: (empty(s, 7, 12), [s, 7, 3, 4]),
    "join": lambda s, t: (empty(s, t, 12), [s * t, 12]),
    "join all": lambda s, _: (empty(s, 7, 12), [s * 84]),
    "split rows": lambda s, t: (empty(s * t, 12), [s, t, 12]),
    "ones": lambda s, _: (empty(s, 7, 12), [1, s, 1, 84, 1]),
    "without ones": lambda s, _: (empty(s, 1, 12).transpose(0, 1), [s, 12]),
    "one element a row": lambda s, _: (empty(s, 8, 1), [s, 8]),
    "permuted": lambda s, _: (empty(s, 7, 12).transpose(0, 1), [7, s, 3, 4]),
    "expanded": lambda s, _: (empty(s, 1, 12).expand(s, 5, 12), [s, 5, 3, 4]),
    "sliced": lambda s, _: (empty(s, 7, 12)[:, 1:, 2:], [s, 6, 5, 2]),
    "windows": lambda s, _: (empty(s, 8, 8, 12), [s, 2, 4, 2, 4, 12]),
    "the rest": lambda s, t: (empty(s, t, 12), [-1, 12]),
    "the rest in the midst": lambda s, t: (empty(s, t, 12), [s, -1, 3, 4]),
    "integers": lambda s, t: (empty(s, t, dtype=torch.int64), [-1, t]),
}

CASES = {
    **CALLS,
    **{f"view, {name}": (aten.view.default, arguments) for name, arguments in VIEWS.items()},
    **{f"unsafe view, {name}": (aten._unsafe_view.default, arguments) for name, arguments in VIEWS.items()},
}


def described(result: Any, arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all that is known of each result, and which argument shares memory with it."""
    memory = [each.untyped_storage()._cdata if isinstance(each, Tensor) else None for each in arguments]
    return [
        (
            *(tuple(map(traced_size, sizes)) for sizes in (each.shape, each.stride(), (each.storage_offset(),))),
            (each.dtype, each.device, each.requires_grad),
            [place for place, storage in enumerate(memory) if storage == each.untyped_storage()._cdata],
        )
        for each in (result if isinstance(result, tuple | list) else (result,))
    ]


def run(operator: Any, arguments: Arguments, *, plain: bool) -> tuple[list[tuple[Any, ...]], list[str], list[str]]:
    """Return the results of a call, the operators whose results were read off, and what is assumed of open sizes."""
    env, found = ShapeEnv(), list[str]()

    def noted(name: Any) -> Callable[..., Any]:
        def results(*args: Any, **kwargs: Any) -> Any:
            results = PLAIN_RESULTS[name](*args, **kwargs)
            found.extend([str(name)] * (results is not None))
            return results

        return results

    with FakeTensorMode(shape_env=env), fake_results_by({name: noted(name) for name in PLAIN_RESULTS} if plain else {}):
        symbols = [env.create_symbol(size, ConstantSource(f"size_{size}"), dynamic_dim=DimDynamic.DYNAMIC) for size in (11, 13)]
        sizes = [env.create_symintnode(symbol, hint=size) for symbol, size in zip(symbols, (11, 13), strict=True)]
        given = arguments(*sizes)
        found.clear()
        with torch.no_grad():
            result = operator(*given)
        return described(result, given), found, [str(guard.expr) for guard in env.guards]


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_decomposition(name: str) -> None:
    found, assumed, assumed_now = compared(*CASES[name])
    assert found == [str(CASES[name][0])]
    assert set(assumed_now) <= set(assumed)


def compared(operator: Any, arguments: Arguments) -> tuple[list[str], list[str], list[str]]:
    """Assert equal results; return the operators whose were read off, what the decomposition assumes of open sizes, and what is now."""
    expected, _, assumed = run(operator, arguments, plain=False)
    result, found, assumed_now = run(operator, arguments, plain=True)
    assert result == expected
    return found, assumed, assumed_now


def test_every_operator_is_compared() -> None:
    assert {operator for operator, _ in CASES.values()} == PLAIN_RESULTS.keys()


NOT_PLAIN: dict[str, tuple[Any, Arguments]] = {
    "overlapping memory": (aten.relu.default, lambda s, _: (empty(1, 7).expand(s, 7),)),
    "memory with gaps": (aten.gelu.default, lambda s, _: (empty(s, 7, 8)[:, :, 1:],)),
    "a dimension of one, permuted": (aten.native_dropout.default, lambda s, _: (empty(s, 1, 8).transpose(0, 2), 0.1, True)),
    "no elements": (aten.view.default, lambda s, _: (empty(s, 0, 8), [s, 4, 0])),
    "a conjugated view": (aten.view.default, lambda s, _: (empty(s, 8, dtype=torch.complex64).conj(), [s, 2, 4])),
    "integers": (aten.mul.Scalar, lambda s, _: (empty(s, 7, dtype=torch.int64), 0.5)),
    "a complex number": (aten.mul.Scalar, lambda s, _: (empty(s, 7), 1j)),
    "no dropout": (aten.native_dropout.default, lambda s, _: (empty(s, 7), 0.1, False)),
    "all dropped": (aten.native_dropout.default, lambda s, _: (empty(s, 7), 1.0, True)),
    "half precision": (aten.native_layer_norm.default, lambda s, _: (empty(s, 8, dtype=torch.bfloat16), [8], None, None, 1e-5)),
    "rows last": (aten.native_group_norm.default, lambda s, _: (empty(4, 4, 8, s).permute(3, 2, 0, 1), None, None, s, 8, 16, 2, 1e-5)),
    "a softmax in another type": (aten._safe_softmax.default, lambda s, _: (empty(s, 7), -1, torch.float64)),
    "one number as bias": (aten.addmm.default, lambda s, _: (empty(1), empty(s, 8), empty(8, 5))),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_other_calls_are_decomposed(name: str) -> None:
    found, assumed, assumed_now = compared(*NOT_PLAIN[name])
    assert str(NOT_PLAIN[name][0]) not in found
    assert assumed_now == assumed


WRONG: dict[str, tuple[Any, Arguments]] = {
    "weights of another size": (aten.native_layer_norm.default, lambda s, _: (empty(s, 8), [8], empty(7), None, 1e-5)),
    "groups that do not divide": (aten.native_group_norm.default, lambda s, _: (empty(s, 8, 4), None, None, s, 8, 4, 3, 1e-5)),
    "unlike matrices": (aten.addmm.default, lambda s, _: (empty(5), empty(s, 8), empty(7, 5))),
    "no such dimension": (aten._safe_softmax.default, lambda s, _: (empty(s, 8), 2)),
    "too few elements": (aten.view.default, lambda s, _: (empty(s, 8), [s, 7])),
    "two unknown sizes": (aten.view.default, lambda s, _: (empty(s, 8), [-1, -1])),
    "no view": (aten.view.default, lambda s, _: (empty(s, 7, 8).transpose(1, 2), [s, 56])),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_has_the_error_of_torch(name: str) -> None:
    errors = []
    for plain in (False, True):
        with pytest.raises((RuntimeError, ValueError, IndexError, AssertionError)) as error:
            run(*WRONG[name], plain=plain)
        errors.append((type(error.value), str(error.value)))
    assert errors[0] == errors[1]


def test_operators_are_decomposed_again_afterwards() -> None:
    """Also behind an inner use, an error, and a call that was decomposed."""
    before = dict(get_fast_op_impls())
    assert not before.keys() & PLAIN_RESULTS.keys(), "PyTorch has fast results of its own: leave these operators to it"
    with contextlib.suppress(RuntimeError), fake_results_by(PLAIN_RESULTS):
        assert get_fast_op_impls().keys() - before.keys() == PLAIN_RESULTS.keys()
        with fake_results_by(PLAIN_RESULTS), FakeTensorMode(shape_env=ShapeEnv()):
            torch.relu(empty(1, 7).expand(3, 7))
        assert get_fast_op_impls().keys() - before.keys() == PLAIN_RESULTS.keys()
        raise RuntimeError
    run(*NOT_PLAIN["memory with gaps"], plain=True)
    assert get_fast_op_impls() == before


@pytest.mark.slow
def test_threads_may_run_fake_tensors_at_once() -> None:
    """Some calls are read off, others decomposed, while threads enter and leave."""
    before = dict(get_fast_op_impls())

    def is_run(name: str) -> bool:
        operator, arguments = (CASES | NOT_PLAIN)[name]
        with fake_results_by(PLAIN_RESULTS), FakeTensorMode(shape_env=(env := ShapeEnv())), torch.no_grad():
            size = env.create_symintnode(env.create_symbol(11, ConstantSource("s"), dynamic_dim=DimDynamic.DYNAMIC), hint=11)
            result = operator(*arguments(size, size))
        return all(11 in map(int, each.shape) for each in (result if isinstance(result, tuple | list) else (result,)))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_run, ["gelu", "memory with gaps", "layer norm", "rows last"] * 8))
    assert get_fast_op_impls() == before


def test_a_call_that_was_looked_up_is_decomposed_when_nothing_is_active_any_more() -> None:
    """Another thread leaves between the look-up and the call."""
    with fake_results_by(PLAIN_RESULTS):
        relu = get_fast_op_impls()[aten.relu.default]
    before = dict(get_fast_op_impls())
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        x = empty(1, 7).expand(3, 7)
    assert relu(mode, x).shape == (3, 7)
    assert get_fast_op_impls() == before
