"""A traced model: one fx graph, and the user's names of its placeholders and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import sympy
import torch
from torch import fx

from passes.ir.torch_private import TreeSpec, tree_flatten, tree_unflatten

SPLITS = "pipe_splits"
"""Key in ``meta`` for the number of earlier calls of ``torch.distributed.pipelining.pipe_split``, if a model has some."""

VARIES = "varies"
"""Entry of ``meta`` of a call that takes elements of a dimension of a fixed size, for other sizes of the inputs another number of them:
``table[:, :length]``. It also stands where these are all: the same call is there for every length."""

WEIGHTED = "weighted_mean"
"""Entry of ``meta`` of a division of a sum over the rows of the batch by a total of weights, which follows from the inputs alone: how many
calls, each of the one before, lead from the total to the divisor. ``sum(loss) / clamp(total, min=1)``: 1."""

Combine = Literal["concatenate", "mean", "sum", "same", "mixed"]
"""How the values of one output over microbatches are combined to the value over the whole batch; ``"mixed"``: no way is correct."""

Results = Literal["rows", "loss", "whole"]
"""The results of ranks that shard the batch. ``"rows"``: their own rows, and outputs without rows whole; ``"loss"``: the same, for a loss
that is computed on the rank's own rows and summed; ``"whole"``: everything whole, for a loss that mixes rows."""


@dataclass(frozen=True)
class Input:
    """One leaf of ``(args, kwargs)``.

    Attributes:
        name: as in the user's call: ``"input_ids"``, ``"args[0]"``, ``"mask['key']"``.
        placeholder: name of its node in the graph; None for a leaf that is not a tensor.
        constant: the value of a leaf that is not a tensor, frozen at trace time.
        shape: sizes with the batch as a sympy expression; empty for a constant.
        dtype: None for a constant.
        batch_dim: the dimension that holds the batch; None when it has none.
        memory_order: its dimensions, outermost in memory first, in a graph that draws random numbers; None in others.
        resident: whether ranks keep it from call to call, sharded as its readers prefer, and forward writes it in place (a key-value
            cache): a program takes the rank's own part.
        open_sizes: the dimensions besides the batch whose size calls may change, each with the name of the size. Dimensions with one name
            have one size. The graph is for the sizes in ``shape``; the model's graphs for others are ``partitioner.tracing``'s.
        unproven: those of these dimensions in which the model may take one size alone: the first call with another one shows it.
    """

    name: str
    placeholder: str | None
    constant: Any
    shape: tuple[int | sympy.Expr, ...]
    dtype: torch.dtype | None
    batch_dim: int | None
    memory_order: tuple[int, ...] | None = None
    resident: bool = False
    open_sizes: tuple[tuple[int, str], ...] = ()
    unproven: frozenset[int] = frozenset()

    @property
    def shape_text(self) -> str:
        """The traced shape as text: ``(batch, 3, height, width)``."""
        names = {dim: name for dim, name in self.open_sizes if dim not in self.unproven}
        sizes = [names.get(dim, _size_text(size)) for dim, size in enumerate(self.shape)]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _size_text(size: int | sympy.Expr) -> str:
    """Return a traced size as text, such as ``batch + 1``."""
    return str(size.subs(dict.fromkeys(size.free_symbols, sympy.Symbol("batch"))) if isinstance(size, sympy.Expr) else size)


@dataclass(frozen=True)
class Written:
    """The destination of a result that is the new value of an input: the caller's tensor.

    Attributes:
        placeholder: of the input.
    """

    placeholder: str


@dataclass(frozen=True)
class Attribute:
    """The destination of a result that forward leaves in an attribute of a module.

    Attributes:
        module: path of the module.
        attribute: its name.
    """

    module: str
    attribute: str


@dataclass(frozen=True)
class Base:
    """The destination of a result that the caller takes other results of, which are views of it (``returned_views``)."""


Destination = Written | Attribute | Base


@dataclass(frozen=True)
class Result:
    """A value that is a result of the graph: its index among them."""

    index: int


class _Appended:
    """The key of an item that is appended to a list."""

    def __repr__(self) -> str:
        return "+"

    def __reduce__(self) -> str:
        return "APPENDED"


APPENDED = _Appended()
"""The key of an item that is appended to a list."""


@dataclass(frozen=True)
class Edit:
    """One assignment of forward to an attribute of a module, or to an item of a list or dict in one.

    Attributes:
        module: path of the module.
        path: name of the attribute, and keys of the item.
        tree: structure of the value.
        leaves: of the value: ``Result`` or what is known.
        count_before: of a count, to which every call adds: its value before the traced call. A call adds the difference.
    """

    module: str
    path: tuple[Any, ...]
    tree: TreeSpec
    leaves: tuple[Any, ...]
    count_before: int | None = None

    @property
    def name(self) -> str:
        """Return the path for the user: ``layer.maps[0]``."""
        keys = "".join(f"[{key!r}]" for key in self.path[1:] if key is not APPENDED)
        return f"{self.module}.{self.path[0]}{keys}".removeprefix(".")


@dataclass(frozen=True)
class Output:
    """One result of the model: a leaf of its returned value, or a value that its forward leaves elsewhere.

    Attributes:
        name: path in the returned structure: ``"logits"``, ``"[0]"``, ``""`` for a bare tensor; else the name of the destination.
        node: name of the node that computes it; None for a constant.
        constant: the value of a leaf that no node computes (None, an int); an expression in the batch for a size.
        combine: how to combine its values over microbatches. ``"mixed"``: the batch cannot be cut.
        batch_dim: the dimension to concatenate over, for ``"concatenate"``.
        reason: why the batch cannot be cut, a clause, for ``"mixed"``.
        destination: where its value goes; None: the model returns it.
        argument: placeholder of the written input that the model returns: the caller gets the tensor back.
    """

    name: str
    node: str | None
    constant: Any
    combine: Combine
    batch_dim: int | None
    reason: str | None = None
    destination: Destination | None = None
    argument: str | None = None

    @property
    def is_computed(self) -> bool:
        """Whether its value differs between calls: a tensor, or a size that depends on the batch."""
        return self.node is not None or isinstance(self.constant, sympy.Expr)

    @property
    def label(self) -> str:
        """Description for errors: ``output logits``, ``the new value of input cache``, ``attribute layer.aux``."""
        if isinstance(self.destination, Written):
            return f"the new value of input {self.name}"
        if isinstance(self.destination, Attribute):
            return f"attribute {self.name}"
        if isinstance(self.destination, Base):
            return "the tensor that several outputs are views of"
        return f"output {self.name}" if self.name else "the result"


@dataclass(frozen=True)
class Total:
    """A number that is counted over the whole batch before it is cut: the divisor of a mean over the batch.

    Attributes:
        placeholder: of the number, in the graph.
        module: the graph that counts it.
        arguments: its arguments: ``"batch"`` and model inputs, whole batch; buffers and constants.
        mean: the call that computes the mean, in the graph before.
    """

    placeholder: str
    module: fx.GraphModule
    arguments: tuple[str, ...]
    mean: str


@dataclass(frozen=True)
class RowMixing:
    """Computations inside of a model that mix rows of the batch, so that their results differ between microbatches and the whole batch.

    Attributes:
        normalizations: module paths of normalisations with statistics over the batch, such as batch normalisation in training.
    """

    normalizations: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.normalizations)


@dataclass(frozen=True)
class Part:
    """One rank's part of a model that is sharded over a mesh; the whole model by default.

    Attributes:
        rows: mesh dimensions that shard the batch; the batch of the graph is a rank's own rows.
        n_row_parts: into how many parts they cut it.
        results: the results of ranks that shard the batch: see ``Results``.
        reduced: parameter -> the mesh dimensions over which its gradient must still be summed.
    """

    rows: tuple[str, ...] = ()
    n_row_parts: int = 1
    results: Results = "rows"
    reduced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class SizedGraphs(Protocol):
    """The graphs of one model, one for each choice of the sizes of its inputs besides the batch (``ModelGraph.open_sizes``)."""

    def at(self, sizes: Mapping[str, int], rows: int) -> ModelGraph:
        """Return the graph for these sizes; raise ConfigError if the model does not take them. ``rows``: of the call, for the error."""

    def call_of(self, sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return args and kwargs of these sizes, to trace the model with."""


@dataclass(frozen=True)
class ModelGraph:
    """A model as one graph, ready to be planned and lowered.

    The placeholders of ``module.graph``, in order: ``batch`` (the batch size, an int; present when it is symbolic), parameters, buffers,
    constants, tensor inputs. Every computing node is a ``call_function`` with ``meta["val"]`` (fake tensors) and
    ``meta["nn_module_stack"]``. The output is one flat tuple, a node or a constant for each of ``outputs``.

        batch | p_wte_weight p_wpe_weight ... | b_mask | input_ids
          |            |                          |          |
          +------------+---- embedding, linear ... ----------+--> (logits,)

    ``partitioner.tracing`` guarantees: sizes come from ``batch`` alone (no ``sym_size``); getitems stand directly after their
    producer; a tied parameter is one placeholder; nested graphs are inlined; operations that do nothing are gone; an in-place
    operation is functional, and buffers are written by declared writes alone (``passes.graph.buffer_writes``).

    Attributes:
        module: the graph (it owns no parameters).
        parameters: placeholder -> original (first) parameter name.
        buffers: placeholder -> original (first) buffer name.
        constants: placeholder -> the tensor (lifted from the model's code).
        aliases: every other original name of a tied parameter or buffer -> its first name.
        inputs: the leaves of ``(args, kwargs)`` in pytree order.
        input_tree: structure of ``(args, kwargs)``.
        outputs: the leaves of what it returns in pytree order, then what forward leaves elsewhere: new values of inputs that it writes,
            and tensors in attributes of modules; then tensors that several of these are views of.
        output_tree: structure of what it returns.
        batch: the symbol of the batch size in every ``meta["val"]``; None when the graph serves ``batch_size`` alone.
        batch_size: the batch size that it was traced with.
        batch_limit: the largest batch that a graph for any batch size serves, since the model computes something else for larger ones;
            None: there is no such limit.
        digest: of what it computes at any batch size, where it serves one: equal for two sizes if the model computes the same for both
            (``FittedSizes.digest``); None: not known.
        training: whether dropout and batch normalisation train; frozen.
        notes: notes for the user, one sentence each.
        mixing: computations that mix rows of the batch (batch normalisation ...), results excepted.
        totals: numbers that programs count over the whole batch and pass to the graph; see ``passes.spmd.mean_to_sum``.
        updates: buffer that forward writes (``passes.graph.buffer_writes``) -> how to combine its new values over microbatches. Running
            statistics of batch normalisation are not among them.
        autocast: the mixed precision that the loss is computed in; casts inside of the model are nodes of the graph.
        part: which part of the model this is, for a graph that ``passes.spmd.localize`` wrote.
        gradient_questions: what code of the model asked of autograd's state, which a call may have otherwise: ``torch.is_grad_enabled()``.
        program_state: plain values outside of tensors and arguments that code of the model may have read.
        deciding_buffers: buffers whose values decide the graph, by name, with the values of the trace.
        for_sizes: gives the graphs of the model for other sizes of its inputs; None: it serves these sizes alone.
        edits: what forward leaves in attributes of modules, in order; ``Result`` is the index of one of ``outputs``.
    """

    module: fx.GraphModule
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    inputs: tuple[Input, ...]
    input_tree: TreeSpec
    outputs: tuple[Output, ...]
    output_tree: TreeSpec
    batch: sympy.Symbol | None
    batch_size: int
    training: bool
    notes: tuple[str, ...]
    mixing: RowMixing = RowMixing()
    totals: tuple[Total, ...] = ()
    updates: Mapping[str, Combine] = field(default_factory=dict)
    autocast: Autocast | None = None
    part: Part = Part()
    digest: str | None = None
    batch_limit: int | None = None
    gradient_questions: tuple[str, ...] = ()
    program_state: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    deciding_buffers: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    for_sizes: SizedGraphs | None = field(default=None, compare=False, repr=False)
    edits: tuple[Edit, ...] = ()

    def serves(self, batch: int) -> bool:
        """Return whether it is the model for batches of so many rows, though traced for another size."""
        return self.batch is not None and (self.batch_limit is None or batch <= self.batch_limit)

    @property
    def open_sizes(self) -> dict[str, int]:
        """The sizes besides the batch that calls may change, by name, as this graph has them: ``{"length": 128}``."""
        return {name: int(leaf.shape[dimension]) for leaf in self.inputs for dimension, name in leaf.open_sizes}

    @property
    def proven_sizes(self) -> dict[str, int]:
        """Those of ``open_sizes`` that the model is known to take in other numbers."""
        unproven = {name for leaf in self.inputs for dimension, name in leaf.open_sizes if dimension in leaf.unproven}
        return {name: size for name, size in self.open_sizes.items() if name not in unproven}

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def weights(self) -> dict[str, str]:
        """Placeholder of a parameter or buffer -> its original name."""
        return {**self.parameters, **self.buffers}

    @property
    def resident(self) -> tuple[str, ...]:
        """The placeholders of resident inputs."""
        return tuple(leaf.placeholder for leaf in self.inputs if leaf.resident and leaf.placeholder is not None)

    @property
    def returned(self) -> tuple[str, ...]:
        """The nodes that the model returns, each once, in the order of the outputs."""
        return tuple(dict.fromkeys(output.node for output in self.outputs if output.node is not None))

    @property
    def leaves(self) -> tuple[Output, ...]:
        """The leaves of the result of the model."""
        return tuple(output for output in self.outputs if output.destination is None)

    @property
    def loss_results(self) -> tuple[Output, ...]:
        """Arguments of a loss function: the leaves of the model's result, then the attributes that it reads."""
        return (*self.leaves, *(output for output in self.outputs if isinstance(output.destination, Attribute) and output.is_computed))

    @property
    def loss_tree(self) -> TreeSpec:
        """The structure of ``loss_results``: what the model returns; with attributes, a pair of it and the list of their values."""
        n_leaves, n_results = self.output_tree.num_leaves, len(self.loss_results)
        if n_results == n_leaves:
            return self.output_tree
        return tree_flatten((tree_unflatten([0] * n_leaves, self.output_tree), [0] * (n_results - n_leaves)))[1]

    @property
    def loss_nodes(self) -> tuple[str, ...]:
        """The nodes of ``loss_results``, each once."""
        return tuple(dict.fromkeys(output.node for output in self.loss_results if output.node is not None))

    @property
    def writes(self) -> dict[str, Output]:
        """Placeholder of an input that forward writes -> the result that is its new value."""
        return {output.destination.placeholder: output for output in self.outputs if isinstance(output.destination, Written)}

    def combine(self, node: str) -> Combine:
        """Return how to combine the values of a returned node over microbatches."""
        return next(output.combine for output in self.outputs if output.node == node)

    @property
    def mixed(self) -> tuple[str, ...]:
        """Describe the results and buffers that microbatches cannot compute, for errors.

        Attributes of modules are not among them: calls that cut the batch leave out those that are mixed.
        """
        found = (each for each in self.outputs if each.combine == "mixed" and not isinstance(each.destination, Attribute))
        mixed = [f"{output.label} ({output.reason})" if output.reason else output.label for output in found]
        mixed += [f"the new value of buffer {self.buffers[name]}" for name, combine in self.updates.items() if combine == "mixed"]
        return tuple(mixed)

    def computing_nodes(self) -> list[fx.Node]:
        """Return all nodes except placeholders and the output, in order."""
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]


@dataclass(frozen=True)
class Autocast:
    """A mixed precision, as of ``torch.autocast``.

    Attributes:
        device_type: of the values that are cast; it determines the ops that autocast casts.
        dtype: the lower precision.
        planned_for: for a model on the meta device, which is traced on the CPU: the device type whose ops are cast instead.
    """

    device_type: str
    dtype: torch.dtype
    planned_for: str | None = None

    def enabled(self, device_type: str | None = None) -> torch.autocast:
        """Return the autocast context, without its cache of casts.

        Args:
            device_type: of the values, if it differs from the one at tracing.
        """
        return torch.autocast(device_type or self.device_type, dtype=self.dtype, cache_enabled=False)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Disable any autocast that the caller has enabled."""
    with contextlib.ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
