"""The call of a partitioned model inside ``torch.compile``: one operator, which no compiler looks into.

    torch.compile(pm)      graph of Dynamo               graphs of a later compiler
      pm(x)                opaque_call(number, x)        forward    out, token = partitioner::forward(x, number)
                                                         backward   x.grad = partitioner::backward(token, out.grad)

The operators run the programs as ``pm(x)`` and ``.backward()`` do without a compiler, so that the programs add the gradients of parameters
to ``.grad``. The token is a tensor with one number, which stands for what the forward saved; that is freed with the token.

Import this module when Dynamo traces, not before: it imports Dynamo, which takes seconds.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from partitioner.runtime.compiled.numbered_models import numbered_model
from passes.ir.errors import ConfigError, TraceError
from passes.ir.torch_private import TreeSpec, autograd_dispatch, nonstrict_trace, tree_flatten, tree_unflatten

__all__ = ["opaque_call"]


@dataclass(frozen=True)
class _Form:
    """The arguments of a call without their tensors.

    Attributes:
        tree: the structure of ``(args, kwargs)``.
        leaves: in pytree order; None for a tensor.
        places: indices of the tensors among the leaves.
    """

    tree: TreeSpec
    leaves: tuple[Any, ...]
    places: tuple[int, ...]

    def arguments(self, tensors: Sequence[Tensor]) -> Any:
        """Return ``(args, kwargs)`` with these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.tree)


class _Saved(bytearray):
    """Values that a forward saves for its backward: the memory of its token, so that it lives as long as that.

    Attributes:
        results: of the model, which autograd tracks.
        inputs: those that require a gradient.
    """

    results: tuple[Tensor, ...] = ()
    inputs: tuple[Tensor, ...] = ()

    def token(self) -> Tensor:
        """Return a tensor with the number of this object in its memory, which is the memory of this object."""
        number = next(_tokens)
        token = torch.frombuffer(self, dtype=torch.int64).fill_(number)
        _saved[number] = self
        return token


_forms: list[_Form] = []  # the operators name a form by its index: it may hold what an operator does not take
_saved: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
_tokens = itertools.count()


@nonstrict_trace
def opaque_call(number: int, _training: bool, anchor: Tensor, args: Any, kwargs: Any) -> list[Any]:
    """Return the computed leaves of ``pm(*args, **kwargs)``, tensors and sizes, in pytree order; see ``Calls.result_of_leaves``.

    Args:
        number: of the model, see ``numbered_model``.
        _training: its mode: compiled code is not reused in the other one.
        anchor: a tensor that requires a gradient if parameters do, which are no inputs of the operator.
    """
    if torch.compiler.is_exporting():
        raise TraceError(
            "a partitioned model runs programs on several ranks and is no part of a graph that could be exported or partitioned again",
            remedy="pass the model itself: torch.export.export(model, ...), or partition the model around it: partition(whole_model, ...)",
        )
    numbered_model(number).calls.refuse_compiled()
    leaves, tree = tree_flatten((args, kwargs))
    places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    form = _index_of(_Form(tree, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), places))
    tensors = [leaves[place] for place in places]
    wanted = [tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors]
    is_tracked = any(wanted) or (anchor.requires_grad and torch.is_grad_enabled())
    # The token goes unused: autograd saves it.
    values, _ = torch.ops.partitioner.forward(anchor, tensors, wanted, is_tracked, number, form)
    return numbered_model(number).calls.computed_leaves(values, args, kwargs)


def _index_of(form: _Form) -> int:
    if form not in _forms:
        _forms.append(form)
    return _forms.index(form)


@torch.library.custom_op(
    "partitioner::forward",
    mutates_args=(),
    schema="(Tensor anchor, Tensor[] inputs, bool[] wanted, bool is_tracked, int number, int form) -> (Tensor[], Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),  # calls with equal arguments are not merged: the model may draw random numbers
)
def _forward(
    _anchor: Tensor, inputs: Sequence[Tensor], wanted: Sequence[bool], is_tracked: bool, number: int, form: int
) -> tuple[list[Tensor], Tensor]:
    """Run the forward of a model; return its distinct results, and the token."""
    model, saved = numbered_model(number), _Saved(8)
    if not model.is_traced:
        raise ConfigError(
            "the model has not been called in these modes of its modules (train, eval), and cannot be traced inside of compiled code",
            remedy="call pm once in these modes without torch.compile, before its compiled form",
        )
    with autograd_dispatch(), torch.set_grad_enabled(is_tracked):
        tensors = [tensor.detach().requires_grad_(each) for tensor, each in zip(inputs, wanted, strict=True)]
        args, kwargs = _forms[form].arguments(tensors)
        if not model.calls.arguments.takes(args, kwargs, with_lacking=True, exactly=False):
            raise ConfigError(
                "compiled code calls the model with other arguments than it was partitioned with, and expects the results for those",
                remedy="partition it with these arguments, partition(model, ..., example_kwargs=...), and compile that",
            )
        model.calls.arguments.check_values(args, kwargs)
        try:
            result = model.forward(*args, **kwargs)
        except TraceError as error:
            if not model.calls.asks_for_gradients:
                raise
            raise ConfigError(
                "the model asks whether gradients are on, or required, and cannot be traced for this answer inside of compiled code",
                remedy="call pm once so (under torch.no_grad(), with inputs that require gradients) without torch.compile, "
                "before its compiled form",
            ) from error
        results = model.calls.values_of(result)
    expected = model.calls.result_shapes(model.calls.arguments.rows_of(args, kwargs))
    if [(list(result.shape), result.dtype) for result in results] != expected:
        raise ConfigError(
            "compiled code expects results of the sizes and types that the model was partitioned for, and this call gives others: it is in "
            "other modes (train, eval), or its inputs have another length",
            remedy="compile a model that is partitioned in these modes, torch.compile(partition(model.eval(), ...)); "
            "call pm without torch.compile for inputs of other lengths, or pad them",
        )
    if any(result.requires_grad for result in results):
        saved.results, saved.inputs = tuple(results), tuple(tensor for tensor in tensors if tensor.requires_grad)
    return [result.detach().clone(memory_format=torch.contiguous_format) for result in results], saved.token()


@_forward.register_fake
def _(
    _anchor: Tensor, inputs: Sequence[Tensor], _wanted: Sequence[bool], _is_tracked: bool, number: int, form: int
) -> tuple[list[Tensor], Tensor]:
    args, kwargs = _forms[form].arguments(inputs)
    model = numbered_model(number)
    shapes = model.calls.result_shapes(model.calls.arguments.rows_of(args, kwargs))
    results = [torch.empty(shape, dtype=dtype, device=model.result_device) for shape, dtype in shapes]
    return results, torch.empty(1, dtype=torch.int64)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    anchor, tensors, wanted, _, _, _ = inputs
    ctx.save_for_backward(anchor, output[1], *(tensor for tensor, each in zip(tensors, wanted, strict=True) if each))
    ctx.wanted = wanted
    ctx.needs_anchor = anchor.requires_grad


def _differentiate(ctx: Any, gradients: list[Tensor | None], _token: None) -> Any:
    anchor, token, *tensors = ctx.saved_tensors
    of_anchor, *found = torch.ops.partitioner.backward(token, anchor, tensors, gradients)
    of_inputs = iter(found)
    return of_anchor if ctx.needs_anchor else None, [next(of_inputs) if each else None for each in ctx.wanted], None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


@torch.library.custom_op(
    "partitioner::backward", mutates_args=(), schema="(Tensor token, Tensor anchor, Tensor[] inputs, Tensor?[] gradients) -> Tensor[]"
)
def _backward(token: Tensor, anchor: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Run the backward of a model; return gradients of the anchor, which is empty, and of the inputs."""
    saved = _saved.get(int(token))
    if saved is None or not saved.results:
        raise ConfigError(
            "the backward of this call of a partitioned model has run already",
            remedy="call backward() once: a partitioned forward keeps nothing for a second one",
        )
    pairs = [(result, grad) for result, grad in zip(saved.results, gradients, strict=True) if result.requires_grad and grad is not None]
    with autograd_dispatch():
        torch.autograd.backward([result for result, _ in pairs], [grad for _, grad in pairs])
    found = [tensor.grad for tensor in saved.inputs]
    saved.results = saved.inputs = ()
    filled = (torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(inputs, found, strict=True))
    return [torch.zeros_like(anchor), *filled]


@_backward.register_fake
def _(_token: Tensor, anchor: Tensor, inputs: Sequence[Tensor], _gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.empty_like(anchor), *map(torch.empty_like, inputs)]


for _operator in (torch.ops.partitioner.forward.default, torch.ops.partitioner.backward.default):
    has_side_effect(_operator)
