"""Errors of tracing, in the user's terms: the module, the source line, and the remedy."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from partitioner.tracing.autograd_functions import CustomFunctionError
from passes.graph.provenance import place_of
from passes.graph.schemas import bound_arguments, packet
from passes.ir.errors import Place, TraceError

__all__ = ["depends_on_sizes", "refuse_data_dependent", "refuse_sparse", "refuse_unplaceable", "trace_error", "why_fixed"]


@dataclass(frozen=True)
class _Kind:
    """One way in which a model cannot be traced.

    Attributes:
        recognizes: whether an exception is of this kind.
        problem: what was wrong, behind "the model".
        remedy: what to do.
    """

    recognizes: Callable[[Exception], bool]
    problem: str
    remedy: str


def _says(*words: str) -> Callable[[Exception], bool]:
    return lambda error: any(word in str(error) for word in words)


def _is_checkpoint(error: Exception) -> bool:
    return isinstance(error, CustomFunctionError) and error.function.__module__ == "torch.utils.checkpoint"


_KINDS = (
    _Kind(
        _is_checkpoint,
        "recomputes activations with reentrant checkpoints, whose backward a trace would lose",
        'checkpoint with use_reentrant=False, or not at all and pass recompute="full"',
    ),
    _Kind(
        lambda error: isinstance(error, CustomFunctionError),
        "applies the custom autograd function {error}, whose backward a trace would lose",
        "write it with differentiable tensor operations, or register it with torch.library.custom_op and torch.library.register_autograd",
    ),
    _Kind(
        lambda error: type(error).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException"),  # no public names of torch
        "calls {error}, which reads the values of a tensor to know what it computes, or how large its result is",
        "compute it outside of the model, in loss_fn for instance, or from operations whose sizes do not depend on values",
    ),
    _Kind(
        _says("data-dependent", "Could not guard on", "Dynamic control flow", "unbacked symbols"),
        "lets the values of a tensor decide what it computes",
        "compute both cases and choose with torch.where, or decide outside of the model and pass the decision as a plain argument",
    ),
    _Kind(
        _says(".numpy()", "data pointer", "data_ptr", "Cannot access storage", "not allocated", "numpy"),
        "reads the values of a tensor outside of PyTorch",
        "compute with PyTorch's own operations, or before and after the model",
    ),
    _Kind(
        _says("not a known type", "pytree", "Unsupported input type", "Unsupported output type"),
        "takes or returns something that is not made of tensors: {error}",
        "use tensors in tuples, lists, dicts, or in dataclasses registered with torch.export.register_dataclass",
    ),
    _Kind(
        _says("no fake impl"),
        "calls an operation of which nothing says how large its result is: {error}",
        "register that with torch.library.register_fake",
    ),
    _Kind(
        _says("__obj_flatten__", "ScriptObject", "script object"),
        "keeps weights in an object that is no tensor, as quantized modules do: {error}",
        "partition the model before it is quantized, or keep its weights as tensors",
    ),
    _Kind(
        _says("device propagation", "found two different devices", "Device Propagation"),
        "mixes devices: {error}",
        "create tensors inside the model on the device of its inputs: torch.arange(n, device=x.device)",
    ),
)


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OF_SIZE = (
    "keep all elements and choose among them: torch.where(mask, x, 0), or a product with the mask, in the place of x[mask], nonzero, "
    "masked_select, unique and repeat_interleave; or choose outside of the model"
)
_OF_NUMBER = "keep it a tensor: y.max() in the place of y.max().item(), or compute it outside of the model and pass it as an argument"


_DENSE = "pass and keep dense tensors, x.to_dense(), or the indices and values as a tensor each"
_SPARSE_GRADIENTS = (torch.ops.aten.embedding, torch.ops.aten.embedding_bag, torch.ops.aten.gather)


def depends_on_sizes(error: Exception) -> bool:
    """Whether the error may be gone when other sizes are traced, or when sizes are not left open."""
    return not isinstance(error, CustomFunctionError) and not any(kind.recognizes(error) for kind in _KINDS[:5])


def trace_error(model: nn.Module, error: Exception) -> TraceError:
    """The error to raise in place of what ``torch.export`` raised; raise it ``from`` that."""
    if isinstance(error, TraceError):
        return error
    place = _place(model, error)
    name = type(model).__name__
    message = _first_line(error)
    for kind in _KINDS:
        if kind.recognizes(error):
            return TraceError(f"{name} cannot be traced: it {kind.problem.format(error=message)}", place=place, remedy=kind.remedy)
    return TraceError(
        f"{name} cannot be traced with the example inputs: {type(error).__name__}: {message}",
        place=place,
        remedy="call the model itself with the example inputs; if that works, that line does what torch.export does not support",
    )


def why_fixed(error: Exception | None) -> str:
    """Why a batch size could not be left open, in one clause."""
    text = str(error)
    if error is None or "specialized it to be a constant" in text or "specialized value" in text:
        return "the model turns it into a constant, as int(x.shape[0]) and loops over it do"
    if "generated guard" in text:
        assumption = text.split("generated guard", 1)[1].splitlines()[0].strip(" .")
        return f"the model assumes that {assumption}"
    return _first_line(error)


def refuse_unplaceable(model: nn.Module) -> None:
    """Raise TraceError when a model is not all there, or placed already: lazy parameters, distributed tensors, several devices."""
    found: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        place = Place(module=name.rpartition(".")[0])
        if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
            raise TraceError(f"{name} has no shape yet", place=place, remedy="call the model once with a batch, then partition it")
        if hasattr(tensor, "device_mesh"):
            raise TraceError(
                f"{name} is distributed already ({type(tensor).__name__})",
                place=place,
                remedy="partition the model before it is parallelised",
            )
        if tensor.layout != torch.strided:
            raise TraceError(f"{name} is sparse ({tensor.layout}), and has no rows or columns to divide", place=place, remedy=_DENSE)
        found.setdefault(tensor.device, name)
    if len(found) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise TraceError(
            f"{type(model).__name__} is on several devices already: {where}",
            place=Place(module=list(found.values())[1].rpartition(".")[0]),
            remedy='move it to one, and partition(...) will place it: model.to("cpu")',
        )


def refuse_data_dependent(model: nn.Module, graph: fx.Graph) -> None:
    """Raise TraceError where the values of a tensor decide a size or a number: no rank could know it before the step.

    torch.export gives such a number a symbol without a hint: ``y.max().item()``, ``x[x > 0]``, ``x.nonzero()``.
    """
    for node in graph.nodes:
        given = node.meta.get("val")
        values = given if isinstance(given, tuple | list) else (given,)
        shapes: list[int | torch.SymInt] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
        sizes = [size for size in shapes if isinstance(size, torch.SymInt) and not size.node.has_hint()]
        numbers = [value for value in values if isinstance(value, _NUMBERS) and not value.node.has_hint()]
        if sizes or numbers:
            what = "how large another is" if sizes else "a plain number that it computes with"
            raise TraceError(
                f"{type(model).__name__} lets the values of a tensor decide {what}",
                place=place_of(node),
                remedy=_OF_SIZE if sizes else _OF_NUMBER,
            )


def refuse_sparse(model: nn.Module, graph: fx.Graph) -> None:
    """Raise TraceError where a tensor, or the gradient of a parameter, is sparse: neither can be cut along an axis, nor be sent."""
    for node in graph.nodes:
        given = node.meta.get("val")
        for value in given if isinstance(given, tuple | list) else (given,):
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                raise TraceError(
                    f"{type(model).__name__} computes with a sparse tensor ({value.layout}), which has no rows or columns to divide",
                    place=place_of(node),
                    remedy=_DENSE,
                )
        if packet(node.target) in _SPARSE_GRADIENTS and any(bound_arguments(node).get(name) for name in ("sparse", "sparse_grad")):
            raise TraceError(
                f"{type(model).__name__} asks for a sparse gradient, which cannot be added up over ranks",
                place=place_of(node),
                remedy="pass sparse=False, or sparse_grad=False: the numbers are the same",
            )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _place(model: nn.Module, error: Exception) -> Place:
    """The innermost module that was running, and the innermost line outside of PyTorch and of this package."""
    names = {module: name for name, module in model.named_modules()}
    module: str | None = None
    source: str | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module) and running in names:
            module = names[running]
        if module is not None and not _is_inside(frame.f_code.co_filename):
            source = f"{frame.f_code.co_filename}:{line}"
    return Place(module=module, source=source)


_OWN = (Path(torch.__file__).parent, Path(__file__).parent)


def _is_inside(file: str) -> bool:
    path = Path(file)
    return file.startswith("<") or any(own in path.parents for own in _OWN)
