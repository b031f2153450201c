"""Errors of tracing, in the user's terms: the module, the source line, and the remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from partitioner.tracing.autograd.functions import CustomFunctionError
from partitioner.tracing.autograd.hooks import AutogradUseError
from partitioner.tracing.inputs.flatten import has_own_rules
from passes.graph.provenance import place_of
from passes.graph.schemas import bound_arguments, packet
from passes.ir.errors import Place, TraceError


@dataclass(frozen=True)
class _Kind:
    """One reason why a model cannot be traced.

    Attributes:
        matches: returns whether an exception has this reason.
        problem: predicate of a sentence about the model; ``{error}`` stands for the exception, ``{kind}`` for the class that it names.
        remedy: advice to the user; ``{remedy}`` stands for that of the exception.
        whatever_size: whether a trace with other sizes, or with fixed sizes, fails for the same reason.
        chooses: whether a mixture of experts that visits chosen experts alone has this reason.
    """

    matches: Callable[[Exception], bool]
    problem: str
    remedy: str
    whatever_size: bool = False
    chooses: bool = False


def _mentions(*phrases: str) -> Callable[[Exception], bool]:
    """Return a test whether the text of an exception has any of the phrases."""
    return lambda error: any(phrase in str(error) for phrase in phrases)


_BY_VALUES = _mentions("data-dependent", "Could not guard on", "Dynamic control flow", "unbacked symbols")


def _is_raised_within(error: Exception, *modules: str) -> bool:
    """Return whether an exception was raised in a call of a module whose name begins so."""
    return any(frame.f_globals.get("__name__", "").startswith(modules) for frame, _ in traceback.walk_tb(error.__traceback__))


def checks_distribution(error: Exception) -> bool:
    """Return whether a distribution of torch checks its arguments, or a sample, by their values."""
    return _BY_VALUES(error) and _is_raised_within(error, "torch.distributions.")


def _packs_sequences(error: Exception) -> bool:
    """Return whether packing sequences fails, or a recurrent layer that reads packed ones."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_globals.get("__name__") == "torch.nn.modules.rnn"]
    of_layer = any(isinstance(frame.f_locals.get("batch_sizes"), torch.Tensor) for frame in frames)
    return of_layer or _is_raised_within(error, "torch.nn.utils.rnn")


def _transforms_function(error: Exception) -> bool:
    """Return whether a transformation of a function by ``torch.func`` fails."""
    return _mentions("functorch")(error) or _is_raised_within(error, "torch._functorch.apis", "torch._functorch.vmap")


_PLAIN_PARTS = (
    "keep what it is made of in plain tensors, and compute with them: for 8-bit weights, buffers of torch.int8 and their scales, and "
    "F.linear(x, weight.to(x.dtype) * scale) in forward (docs: inference)"
)
_MAKE_DENSE = "pass and keep dense tensors, x.to_dense(), or the indices and values as a tensor each"

_KINDS = (
    _Kind(
        lambda error: isinstance(error, CustomFunctionError),
        "applies the custom autograd function {error}",
        "compute in its forward and its backward with PyTorch's operations on its arguments alone, or register it with "
        "torch.library.custom_op and register_autograd",
        whatever_size=True,
    ),
    _Kind(lambda error: isinstance(error, AutogradUseError), "{error}", "{remedy}", whatever_size=True),
    _Kind(
        lambda error: type(error).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException"),  # no public names of torch
        "calls {error}, which reads the values of a tensor to know what it computes, or how large its result is",
        "compute it outside of the model, in loss_fn for instance, or from operations whose sizes do not depend on values",
        whatever_size=True,
        chooses=True,
    ),
    _Kind(
        _packs_sequences,
        "packs sequences, so that the values of their lengths decide how many rows each step computes",
        "call the layer on the padded batch, and leave padding out afterwards: y[torch.arange(y.shape[0]), lengths - 1] is the last output "
        "of each row; a layer of two directions reads padding, so make it two layers, and flip the rows of one by their lengths",
        whatever_size=True,
    ),
    _Kind(
        checks_distribution,
        "has a distribution of torch check its arguments, or a sample, which reads the values of tensors",
        "leave validate_args=True out: then traces make distributions that do not check",
        whatever_size=True,
    ),
    _Kind(
        _BY_VALUES,
        "lets the values of a tensor decide what it computes",
        "compute both cases and choose with torch.where, or decide outside of the model and pass the decision as a plain argument",
        whatever_size=True,
        chooses=True,
    ),
    _Kind(
        _mentions(".numpy()", "data pointer", "data_ptr", "Cannot access storage", "not allocated", "numpy"),
        "reads the values of a tensor outside of PyTorch",
        "compute with PyTorch's own operations, or before and after the model",
        whatever_size=True,
    ),
    _Kind(
        _mentions("not a known type", "pytree", "Unsupported input type", "Unsupported output type"),
        "takes or returns {kind}, which is not made of tensors",
        "use tensors, numbers and strings, in tuples, lists, dicts or dataclasses",
        whatever_size=True,
    ),
    _Kind(
        _mentions("fake tensor in the exported program constant's list"),
        "writes a tensor where a trace does not see it: into the .data of a parameter or buffer, or into an object that outlives the call",
        "keep what forward changes in a buffer, and write into the buffer itself, self.state.copy_(...); change parameters between steps",
        whatever_size=True,
    ),
    _Kind(
        _mentions("Couldn't swap"),
        "moves or converts a module in its forward",
        "move it before the model is partitioned: model.to(...)",
        whatever_size=True,
    ),
    _Kind(
        _mentions("FakeTensor.__format__"),
        "formats the values of a tensor as text",
        "return the tensor, and print it after the call",
        whatever_size=True,
    ),
    _Kind(
        _mentions("_to_sparse", "sparse_coo"),
        "computes with a sparse tensor, which has no rows or columns to divide",
        _MAKE_DENSE,
    ),
    _Kind(
        _mentions("nested_tensor", "_nested_", "NestedTensor"),
        "computes with a nested tensor, of several shapes, which has no rows or columns to divide",
        "compute with a padded tensor and a mask",
    ),
    _Kind(
        _transforms_function,
        "transforms a function (torch.func) in a way that cannot be traced: {error}",
        "compute the derivative outside of the model, or write it out with tensor operations",
        whatever_size=True,
    ),
    _Kind(
        _mentions("new Tensor subclass", "cast NotImplemented"),
        "computes with a tensor of a class that computes by rules of its own: {error}",
        "compute with plain tensors; attention takes a mask as a tensor, attn_mask=mask, or is_causal=True",
        whatever_size=True,
    ),
    _Kind(
        _mentions("no fake impl"),
        "calls an operation of which nothing says how large its result is: {error}",
        "register that with torch.library.register_fake",
    ),
    _Kind(
        _mentions("__obj_flatten__", "ScriptObject", "script object"),
        "keeps weights in an object that is no tensor, as quantized modules do: {error}",
        _PLAIN_PARTS,
    ),
    _Kind(
        _mentions("device propagation", "found two different devices", "Device Propagation"),
        "mixes devices: {error}",
        "create tensors inside the model on the device of its inputs: torch.arange(n, device=x.device)",
    ),
)

_EXPERTS_REMEDY = (
    "a loop over the experts that some token chose has no graph: for models of transformers, install transformers 5 or newer, and call "
    'model.set_experts_implementation("grouped_mm"); in own code, sort the tokens by expert and multiply them with '
    "torch.nn.functional.grouped_mm (in bfloat16), or let every expert compute every token, and multiply what was not chosen by zero"
)
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SIZE_REMEDY = (
    "keep all elements and choose among them: torch.where(mask, x, 0), or a product with the mask, instead of x[mask], nonzero, "
    "masked_select, unique and repeat_interleave; or choose outside of the model: for convolutions of graphs, pass add_self_loops=False, "
    "and edges that hold one self-loop a node"
)
_NUMBER_REMEDY = "keep it a tensor: y.max() instead of y.max().item(), or compute it outside of the model and pass it as an argument"
_SPARSE_GRADIENTS = (torch.ops.aten.embedding, torch.ops.aten.embedding_bag, torch.ops.aten.gather)


def depends_on_sizes(error: Exception) -> bool:
    """Return whether a trace with other sizes, or with fixed sizes, may succeed."""
    return not any(kind.whatever_size and kind.matches(error) for kind in _KINDS)


def trace_error(model: nn.Module, error: Exception, clause: str = "") -> TraceError:
    """Return the error to raise, ``from`` the given one, in place of an error of ``torch.export``.

    Args:
        clause: for the end of the remedy of an error that other inputs may avoid.
    """
    if isinstance(error, TraceError):
        return error
    place = _place(model, error)
    name = type(model).__name__
    message = _first_line(error)
    for kind in _KINDS:
        if kind.matches(error):
            remedy = kind.remedy.format(remedy=getattr(error, "remedy", ""))
            if kind.chooses and _has_experts(model, place):
                remedy = _EXPERTS_REMEDY
            problem = kind.problem.format(error=message, kind=_named_class(message))
            return TraceError(f"{name} cannot be traced: it {problem}", place=place, remedy=remedy)
    return TraceError(
        f"{name} cannot be traced with these inputs: {type(error).__name__}: {message}",
        place=place,
        remedy="call the model itself with the example inputs; if that works, that line does what torch.export does not support" + clause,
    )


def _named_class(message: str) -> str:
    """Return the class that an error of torch names, with its article: ``"a generator"``."""
    found = re.search(r"<class '([^']+)'>", message)
    name = "an object" if found is None else found[1].rpartition(".")[2]
    return name if found is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _has_experts(model: nn.Module, place: Place) -> bool:
    """Return whether a module is one of experts, or has some, by its name and those of its submodules and parameters."""
    if place.module is None or place.module not in dict(model.named_modules()):
        return False
    module = model.get_submodule(place.module)
    own = (name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False)))
    names = (type(module).__name__, place.module.rpartition(".")[2], *own)
    return any(word in name.lower() for name in names for word in ("expert", "moe"))


def why_fixed(error: Exception | None) -> str:
    """Return a clause that says why the batch size could not be left open; None: no error, but the size came out constant."""
    text = str(error)
    if error is None or "specialized it to be a constant" in text or "specialized value" in text:
        return "the model turns it into a constant, as int(x.shape[0]) and loops over it do"
    if "generated guard" in text:
        assumption = text.split("generated guard", 1)[1].splitlines()[0].strip(" .")
        return f"the model assumes that {assumption}"
    return _first_line(error)


def refuse_unplaceable(model: nn.Module) -> None:
    """Raise TraceError for a model with lazy, distributed, sparse or quantized tensors, tensors with own rules, or on several devices."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{type(module).__name__} is a module of TorchScript, which cannot be traced",
                place=Place(module=name),
                remedy="partition the module that it was scripted or traced from",
            )
    first_on: dict[torch.device, str] = {}
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
            raise TraceError(f"{name} is sparse ({tensor.layout}), and has no rows or columns to divide", place=place, remedy=_MAKE_DENSE)
        if tensor.is_quantized:
            raise TraceError(f"{name} is a quantized tensor ({tensor.dtype}), which a graph cannot hold", place=place, remedy=_PLAIN_PARTS)
        if has_own_rules(tensor):
            raise TraceError(
                f"{name} is a {type(tensor).__name__}, a class of tensors that computes by rules of its own, which a graph does not have",
                place=place,
                remedy=_PLAIN_PARTS,
            )
        first_on.setdefault(tensor.device, name)
    if len({parameter.device for parameter in model.parameters()} - {torch.device("meta")}) == 0 and torch.device("meta") in first_on:
        return  # buffers that the constructor made on the CPU have their values
    if len(first_on) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in first_on.items())
        raise TraceError(
            f"{type(model).__name__} is on several devices already: {where}",
            place=Place(module=list(first_on.values())[1].rpartition(".")[0]),
            remedy='move it to one, and partition(...) will place it: model.to("cpu")',
        )


def refuse_data_dependent(model: nn.Module, graph: fx.Graph) -> None:
    """Raise TraceError where a size or a number depends on the values of a tensor, so that no rank knows it before the step.

    torch.export gives such a number a symbol without a hint: ``y.max().item()``, ``x[x > 0]``, ``x.nonzero()``.
    """
    for node in graph.nodes:
        values = _values_of(node)
        sizes: list[int | torch.SymInt] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
        has_unknown_size = any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in sizes)
        has_unknown_number = any(isinstance(value, _NUMBERS) and not value.node.has_hint() for value in values)
        if has_unknown_size or has_unknown_number:
            what = "how large another is" if has_unknown_size else "a plain number that it computes with"
            place, remedy = place_of(node), _SIZE_REMEDY if has_unknown_size else _NUMBER_REMEDY
            raise TraceError(
                f"{type(model).__name__} lets the values of a tensor decide {what}",
                place=place,
                remedy=_EXPERTS_REMEDY if has_unknown_size and _has_experts(model, place) else remedy,
            )


def refuse_sparse(model: nn.Module, graph: fx.Graph) -> None:
    """Raise TraceError where a tensor, or the gradient of a parameter, is sparse: neither can be sharded or sent."""
    for node in graph.nodes:
        for value in _values_of(node):
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                raise TraceError(
                    f"{type(model).__name__} computes with a sparse tensor ({value.layout}), which has no rows or columns to divide",
                    place=place_of(node),
                    remedy=_MAKE_DENSE,
                )
        if packet(node.target) in _SPARSE_GRADIENTS and any(bound_arguments(node).get(name) for name in ("sparse", "sparse_grad")):
            raise TraceError(
                f"{type(model).__name__} asks for a sparse gradient, which cannot be added up over ranks",
                place=place_of(node),
                remedy="pass sparse=False, or sparse_grad=False: the numbers are the same",
            )


def refuse_mixed_products(graph: fx.Graph) -> None:
    """Raise TraceError for a matrix product of two dtypes: PyTorch refuses it for tensors with values, but not for those of a trace."""
    for node in graph.nodes:
        if node.target not in _PRODUCTS:
            continue
        dtypes = {value.dtype: None for each in node.all_input_nodes for value in _values_of(each) if isinstance(value, torch.Tensor)}
        if len(dtypes) > 1:
            raise TraceError(
                f"a matrix product needs one dtype, and has {' and '.join(map(str, dtypes))}",
                place=place_of(node),
                remedy="pass inputs of the dtype of the parameters, x.float(), or convert the model, model.double()",
            )


_PRODUCTS = (torch.ops.aten.linear.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _values_of(node: fx.Node) -> Sequence[Any]:
    """Return the traced results of a node; most have one."""
    value = node.meta.get("val")
    return value if isinstance(value, tuple | list) else (value,)


_CAUSE = re.compile(r"Explanation: .*\bgot \w+\((['\"])(.*?)(?:\\n|\1\))")
"""The cause of an error of Dynamo, which traces the bodies of loops and branches and calls its own failure first."""


def _first_line(error: Exception) -> str:
    """Return the first line of an error, and that of its cause where the first line is of Dynamo."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    cause, count = _CAUSE.search(str(error)), 2 if lines[0].endswith(":") else 1
    return " ".join(lines[:count]) + ("" if cause is None else f": {cause[2]}")


def _place(model: nn.Module, error: Exception) -> Place:
    """Return the innermost module that was running, and the innermost source line outside of torch and this package."""
    names = {module: name for name, module in model.named_modules()}
    module: str | None = None
    source: str | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module) and running in names:
            module = names[running]
        if module is not None and not _is_library_code(frame.f_code.co_filename):
            source = f"{frame.f_code.co_filename}:{line}"
    return Place(module=module, source=source)


_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parent, Path(__file__).parents[2] / "passes")


def _is_library_code(file: str) -> bool:
    """Return whether a file belongs to torch or this package, or is generated code such as ``<string>``."""
    path = Path(file)
    return file.startswith("<") or any(library in path.parents for library in _LIBRARIES)
