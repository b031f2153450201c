"""Trace a loop over the experts that some token chose as one pass of all tokens, each with the matrices of the experts that it chose.

    for expert in (mask.sum((1, 2)) > 0).nonzero():             rows = x.repeat_interleave(2, 0)
        place, row = torch.where(mask[expert].squeeze(0))       w = torch.stack([expert.w for expert in experts])
        y = experts[expert](x[row])                             y = partitioner.grouped_mm(rows, w, chosen)
        result.index_add_(0, row, y * scale[row, place, None])  result += (y * scale.reshape(-1, 1)).reshape(-1, 2, n).sum(1)

How many tokens an expert gets is known only from values, so no graph can have this loop. But its body computes row by row, and is the same
for every expert: one expert is traced for all, on all pairs of a token and a choice, and its weights stand for those of each. transformers
before version 5, Mistral's reference and what is modelled on them are written in this way, also with ``range(n)`` and
``torch.where(chosen == number)``.

That the body is the same for every expert is not believed: ``export_with_experts`` compares with a trace in which the last expert stands
for all. That it computes row by row is checked by the rules of its operations (``passes/normalize/rows/expert_rows.py``). What the loop
asks besides is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from partitioner.tracing.export.expert_stand_ins import (
    Choice,
    Expert,
    MaskRow,
    Nothing,
    Pairs,
    StandIn,
    WeightOfEach,
)
from partitioner.tracing.export.forward_context import entered_in_forward
from partitioner.tracing.repeated.find import Forms
from partitioner.tracing.restore import preserve
from passes.graph.canonicalize import has_effect
from passes.ir.torch_private import tree_leaves
from passes.normalize.rows.expert_rows import ChosenExpertsError, end_of_expert_rows, expert_rows
from passes.rules.ops.grouped_mm import grouped_mm

__all__ = ["export_with_experts", "one_expert_for_all"]

_MaskFact: TypeAlias = tuple[Choice, tuple[str, ...]]
"""Of a mask: its choice, and what its dimensions are of: "token", "choice", "expert"."""

_NOT_WRITTEN = (Tensor.index_add_, Tensor.index_add, torch.index_add, Tensor.__setitem__)
"""Functions that leave their first argument as it is if they are given no rows."""


def export_with_experts(model: nn.Module, export: Callable[[], ExportedProgram]) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Export a model; if it loops over chosen experts, twice, and compare.

    Returns:
        The program, and a note if there is such a loop.

    Raises:
        ChosenExpertsError: a loop does not compute the same for every expert, or asks what has no answer for all tokens.
    """
    first = _ChosenExperts(model)
    with preserve(model), entered_in_forward(model, first.listening):
        program = export()
    counts = first.counts()
    if not counts:
        return program, ()
    with preserve(model), entered_in_forward(model, _ChosenExperts(model, counts).listening):
        second = export()
    if _live_calls(program.graph_module) != _live_calls(second.graph_module):
        raise ChosenExpertsError("computes something else for its last expert than for its first")
    return program, (_NOTE,)


_NOTE = (
    "loops over the experts that some token chose are traced as one product of all tokens, each with the matrices of the experts that it "
    "chose; matrices that are parameters of their own are put together in every step, and an expert that no token chose has gradients of "
    "zeros; dropout inside of experts draws one mask for all of them, not the model's"
)


@contextlib.contextmanager
def one_expert_for_all(model: nn.Module) -> Iterator[None]:
    """While active, one expert of each loop over chosen experts stands for all of them."""
    with _ChosenExperts(model).listening():
        yield


def _live_calls(module: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return the calls that a graph needs, with their arguments; nodes are told by their places, subgraphs by their calls."""
    live: dict[fx.Node, int] = {}
    graph = module.graph
    needed = {node for node in graph.nodes if node.op in ("output", "placeholder") or has_effect(node)}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    calls = []
    for node in graph.nodes:
        if node in needed:
            arguments = fx.map_arg((node.args, node.kwargs), live.__getitem__)
            part = getattr(module, str(node.target), None) if node.op == "get_attr" else None
            target = _live_calls(part) if isinstance(part, fx.GraphModule) else str(node.target)
            calls.append((node.op, target, str(arguments)))
            live[node] = len(live)
    return calls


class _ChosenExperts(TorchFunctionMode):
    """While active, one expert of a loop over chosen experts stands for all of them.

    Args:
        model: whose lists of alike modules may be experts.
        counts: how many experts each choice has, in the order of the trace: the last of them is traced; None: the first is.
    """

    def __init__(self, model: nn.Module, counts: Sequence[int] | None = None) -> None:
        super().__init__()
        self._counts = counts
        self._choices: list[Choice] = []
        self._masks: dict[int, tuple[Tensor, _MaskFact]] = {}
        self._compared: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._rows: dict[int, tuple[Tensor, Choice, Tensor]] = {}
        self._sums: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._experts = _alike_members(model)
        self._answered: list[nn.Module] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Be active; calls of members of lists of modules are answered inside of loops."""
        try:
            with self:
                yield
        finally:
            self._end_body()

    def _begin_body(self, choice: Choice) -> None:
        """Answer calls of what may be the experts of a choice, until ``_end_body``; those that are answered already stay so."""
        self._end_body()
        for experts in self._experts.values():
            if choice.n_classes in (None, len(experts), len(experts) + 1):
                for path, module in experts.items():
                    if "forward" not in vars(module):
                        vars(module)["forward"] = functools.partial(self._call_member, path, module.forward)
                        self._answered.append(module)

    def _end_body(self) -> None:
        for module in self._answered:
            vars(module).pop("forward", None)  # torch.export erases what it finds assigned, where a loop is the last of the model
        self._answered.clear()

    def counts(self) -> list[int]:
        """Return the number of experts of each choice whose rows the model has asked for.

        Raises:
            ChosenExpertsError: the model has not asked for each of them.
        """
        visited = [choice for choice in self._choices if choice.is_visited]
        for choice in visited:
            if choice.count is None:
                raise ChosenExpertsError(
                    "asks for the tokens of each, without alike experts in a ModuleList or weights that are indexed by the expert"
                )
            if not choice.visited >= set(range(choice.count)):
                raise ChosenExpertsError(f"visits {len(choice.visited)} of {choice.count} experts")
        return [choice.count or 1 for choice in self._choices] if visited else []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func not in _KNOWN and not (self._choices and any(choice.is_visited for choice in self._choices)):
            return func(*args, **(kwargs or {}))
        return self._compute(func, *args, **(kwargs or {}))

    def _compute(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a torch function, of stand-ins or of tensors that it knows something about."""
        stand_ins = [value for value in tree_leaves((args, kwargs)) if isinstance(value, StandIn)]
        if any(isinstance(each, Nothing) for each in stand_ins):
            if func in _NOT_WRITTEN:
                self._end_body()
            return args[0] if func in _NOT_WRITTEN and isinstance(args[0], Tensor) else Nothing(self._compute)
        known = _KNOWN.get(func)
        result = NotImplemented if known is None else known(self, func, *args, **kwargs)
        if result is not NotImplemented:
            return result
        if not stand_ins:
            return self._of_rows(func(*args, **kwargs), args)
        if all(isinstance(each, MaskRow) for each in stand_ins):
            plain = [each.tensor() if isinstance(each, MaskRow) else each for each in args]
            return func(*plain, **kwargs)
        raise ChosenExpertsError(f"calls {getattr(func, '__name__', func)} with the experts that tokens chose, or with their rows")

    # -- masks, and what is asked of them ----------------------------------------------------------------------------------------------

    def _choice(self, experts: Tensor, n_classes: int | None) -> Choice:
        number = len(self._choices)
        traced = 0 if self._counts is None or number >= len(self._counts) else self._counts[number] - 1
        self._choices.append(Choice(experts, traced, n_classes))
        return self._choices[-1]

    def one_hot(self, func: Any, experts: Any, num_classes: int = -1) -> Any:
        mask = func(experts, num_classes)
        if experts.dim() == 2 and num_classes > 0:
            self._masks[id(mask)] = mask, (self._choice(experts, num_classes), ("token", "choice", "expert"))
        return mask

    def permute(self, func: Any, mask: Any, *dims: Any, **kwargs: Any) -> Any:
        if id(mask) not in self._masks:
            return NotImplemented
        permuted = func(mask, *dims, **kwargs)
        order = kwargs.get("dims", dims[0] if len(dims) == 1 else dims)
        choice, names = self._masks[id(mask)][1]
        self._masks[id(permuted)] = permuted, (choice, tuple(names[dim] for dim in order))
        return permuted

    def sum(self, func: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the tokens of each expert: a sum over tokens and choices."""
        if id(mask) not in self._masks:
            return NotImplemented
        choice, names = self._masks[id(mask)][1]
        total = func(mask, *args, **kwargs)
        dims = kwargs.get("dim", args[0] if args else None)
        summed = {names[dim] for dim in dims} if isinstance(dims, tuple | list) else set()
        if summed == {"token", "choice"}:
            self._masks[id(total)] = total, (choice, ("expert",))
        return total

    def is_positive(self, func: Any, total: Any, other: Any) -> Any:
        if isinstance(total, Expert):
            return self._is_number(total, other)
        if isinstance(total, StandIn):
            return NotImplemented
        if id(total) not in self._masks or not isinstance(other, int) or other != 0:
            return self._equals(func, total, other)
        hit = func(total, other)
        self._masks[id(hit)] = hit, self._masks[id(total)][1]
        return hit

    def _is_number(self, expert: Expert, other: Any) -> bool:
        """Return whether a number is an expert: False for a class that does not exist, or the last, of tokens without an expert."""
        classes = expert.choice.n_classes
        if isinstance(other, int) and classes is not None and other >= classes:
            return False
        if classes is None or other != classes - 1:
            raise ChosenExpertsError(f"asks which of the experts number {other} is")
        self._note_size(expert.choice, classes - 1)
        return False

    def _equals(self, func: Any, chosen: Any, number: Any) -> Any:
        """Return the mask of expert 3 for ``chosen == 3``, of which only ``torch.where`` may ask for rows."""
        if func not in _EQUALITIES or type(number) is not int or number < 0 or not _chooses(chosen):
            return NotImplemented
        mask = func(chosen, number)
        self._compared[id(mask)] = mask, chosen, number
        return mask

    def nonzero(self, func: Any, hit: Any, *args: Any, **kwargs: Any) -> Any:
        """Yield the chosen experts: one of them, which represents all."""
        if isinstance(hit, MaskRow) or id(hit) in self._compared:
            return self._pairs(hit) if kwargs.get("as_tuple") else NotImplemented
        if id(hit) not in self._masks or self._masks[id(hit)][1][1] != ("expert",):
            return NotImplemented
        choice = self._masks[id(hit)][1][0]
        choice.visit(None)
        is_tuple = kwargs.get("as_tuple", False) or func is torch.where
        experts = [Expert(self._compute, choice, 0 if is_tuple else 1)]
        return (experts,) if is_tuple else _Visited(experts)

    def where(self, func: Any, condition: Any, *others: Any, **kwargs: Any) -> Any:
        if others or kwargs:
            return NotImplemented
        if isinstance(condition, MaskRow) or id(condition) in self._compared:
            return self._pairs(condition)
        return self.nonzero(func, condition)

    def _pairs(self, row: Any) -> tuple[StandIn, ...]:
        """Return the indices of the tokens of an expert, and of its places among their choices."""
        if isinstance(row, MaskRow):
            choice, number, dims = row.choice, row.number, row.dims
        else:
            _, chosen, number = self._compared[id(row)]
            known = [choice for choice in self._choices if choice.experts is chosen]
            choice, dims = known[0] if known else self._choice(chosen, None), ("token", "choice")
        if "one" in dims:
            raise ChosenExpertsError("asks for the tokens of an expert in a mask of three dimensions")
        choice.visit(number)
        self._begin_body(choice)
        if number is None or number == choice.traced:
            return tuple(Pairs(self._compute, choice, name) for name in dims)
        return tuple(Nothing(self._compute) for _ in dims)

    # -- indexing ----------------------------------------------------------------------------------------------------------------------

    def getitem(self, func: Any, value: Any, index: Any) -> Any:
        if isinstance(value, Expert):
            if index != 0:
                raise ChosenExpertsError("indexes the number of an expert")
            return Expert(self._compute, value.choice, value.n_dims - 1)
        if isinstance(value, StandIn):
            return self.squeeze(func, value) if index == 0 else NotImplemented
        if id(value) in self._masks and self._masks[id(value)][1][1][:1] == ("expert",) and isinstance(index, int | Expert):
            return self._mask_row(value, index)
        indices = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(each, StandIn) for each in indices):
            return NotImplemented
        return self._index(value, indices)

    def _mask_row(self, mask: Tensor, index: int | Expert) -> MaskRow | Any:
        choice, (_, *dims) = self._masks[id(mask)][1]
        if len(dims) != 2 or isinstance(index, bool):
            return NotImplemented
        if isinstance(index, Expert):
            return MaskRow(self._compute, choice, mask, None, ("one",) * index.n_dims + tuple(dims))
        return MaskRow(self._compute, choice, mask, index + mask.shape[0] if index < 0 else index, tuple(dims))

    def squeeze(self, func: Any, value: Any, *_: Any, **__: Any) -> Any:
        """Leave out a dimension of one element in front."""
        if isinstance(value, MaskRow) and value.dims[0] == "one":
            return MaskRow(self._compute, value.choice, value.mask, value.number, value.dims[1:])
        if isinstance(value, Expert):
            return Expert(self._compute, value.choice, 0)
        if isinstance(value, WeightOfEach) and value.n_leading:
            return WeightOfEach(self._compute, value.choice, value.stacked, is_transposed=value.is_transposed)
        return NotImplemented

    def _index(self, value: Tensor, indices: tuple[Any, ...]) -> Any:
        """Return the rows of a tensor for all pairs, ``x[row]``, ``scale[row, place, None]``, or a weight of each, ``weight[expert]``."""
        at = [number for number, each in enumerate(indices) if isinstance(each, StandIn)]
        chosen, new = [indices[number] for number in at], [*indices[: at[0]], *indices[at[-1] + 1 :]]
        choice = chosen[0].choice
        if at != list(range(at[0], at[0] + len(at))) or any(each is not None for each in new):
            raise ChosenExpertsError("indexes by the tokens of an expert and by something else")
        if isinstance(chosen[0], Expert):
            if len(chosen) > 1 or new:
                raise ChosenExpertsError("indexes by the number of an expert and by something else")
            self._note_size(choice, int(value.shape[0]))
            return WeightOfEach(self._compute, choice, value, n_leading=chosen[0].n_dims)
        rows: Tensor = expert_rows(
            _rows_of_pairs(value, choice, tuple(each.of if isinstance(each, Pairs) else "expert" for each in chosen))
        )
        self._rows[id(rows)] = rows, choice, value
        for _ in range(at[0]):
            rows = rows.unsqueeze(0)
        for _ in range(len(indices) - at[-1] - 1):
            rows = rows.unsqueeze(at[0] + 1)
        self._rows[id(rows)] = rows, choice, value
        return rows

    def _note_size(self, choice: Choice, count: int) -> None:
        """Note how many experts there are; a mask may have one class more, of tokens that chose none."""
        is_class = choice.n_classes in (None, count, count + 1)
        if not is_class or choice.count not in (None, count):
            raise ChosenExpertsError(f"has {count} weights for {choice.count or choice.n_classes} experts")
        choice.count = count

    # -- rows --------------------------------------------------------------------------------------------------------------------------

    def _of_rows(self, result: Any, args: tuple[Any, ...]) -> Any:
        """Note that a result is computed from the rows of all pairs."""
        known = next((self._rows[id(each)] for each in args if id(each) in self._rows), None)
        for each in tree_leaves(result) if known is not None else ():
            if isinstance(each, Tensor):
                self._rows[id(each)] = each, *known[1:]  # type: ignore[index]
        return result

    def index_add(self, func: Any, value: Tensor, dim: int, index: Any, source: Any, **kwargs: Any) -> Any:
        if not isinstance(index, Pairs):
            return NotImplemented
        if index.of != "token" or dim != 0 or kwargs or not isinstance(source, Tensor):
            raise ChosenExpertsError("adds up what the experts give along another dimension than the tokens")
        self._end_body()
        added = _sum_of_pairs(source, index.choice)
        return value.add_(added) if func is Tensor.index_add_ else value.add(added)

    def setitem(self, func: Any, value: Tensor, index: Any, source: Any) -> Any:
        """Assign a sum for ``result[row] += y``."""
        if not isinstance(index, Pairs):
            return NotImplemented
        known = self._sums.get(id(source))
        if known is None or known[1] is not value or index.of != "token":
            raise ChosenExpertsError("assigns what the experts give, rather than adding it")
        self._end_body()
        return value.add_(_sum_of_pairs(known[2], index.choice))

    def arithmetic(self, func: Any, one: Any, other: Any, **kwargs: Any) -> Any:
        """Elementwise, with a vector of each expert; and sums that ``_setitem`` assigns."""
        weights = [each for each in (one, other) if isinstance(each, WeightOfEach)]
        if weights and not kwargs and len(weights) == 1:
            rows, others = _rows_of_weight(weights[0]), [each for each in (one, other) if each is not weights[0]]
            if not isinstance(others[0], Tensor | float | int):
                return NotImplemented
            return self._of_rows(func(*(rows if each is weights[0] else each for each in (one, other))), (one, other))
        if func in _SUMS and isinstance(other, Tensor) and id(one) in self._rows and not kwargs:
            total = torch.add(one, other)
            self._sums[id(total)] = total, self._rows[id(one)][2], other
            return self._of_rows(total, (one,))
        return NotImplemented

    # -- products ----------------------------------------------------------------------------------------------------------------------

    def matmul(self, func: Any, rows: Any, weight: Any) -> Any:
        if not isinstance(weight, WeightOfEach):
            return NotImplemented
        return self._of_rows(_product(rows, weight, weight.is_transposed), (rows,))

    def linear(self, func: Any, rows: Any, weight: Any, bias: Any = None) -> Any:
        if not isinstance(weight, WeightOfEach):
            return NotImplemented
        result = _product(rows, weight, not weight.is_transposed)
        if bias is not None:
            result = result + (_rows_of_weight(bias).to(result.dtype) if isinstance(bias, WeightOfEach) else bias)
        return self._of_rows(result, (rows,))

    def transpose(self, func: Any, weight: Any, *_: Any) -> Any:
        if not isinstance(weight, WeightOfEach):
            return NotImplemented
        return WeightOfEach(
            self._compute, weight.choice, weight.stacked, is_transposed=not weight.is_transposed, n_leading=weight.n_leading
        )

    def cast(self, func: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, WeightOfEach):
            stacked = func(value.stacked, *args, **kwargs)
            return WeightOfEach(self._compute, value.choice, stacked, is_transposed=value.is_transposed, n_leading=value.n_leading)
        return value if isinstance(value, StandIn) else NotImplemented

    def _call_member(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module of a list: with the rows of all pairs, for all members; with nothing, for none."""
        if any(isinstance(each, Nothing) for each in args):
            return Nothing(self._compute)
        known = self._rows.get(id(args[0])) if args else None
        if known is None:
            return forward(*args, **kwargs)
        (experts,) = [members for members in self._experts.values() if path in members]
        choice = known[1]
        self._note_size(choice, len(experts))
        if list(experts).index(path) != choice.traced:
            raise ChosenExpertsError("computes with another expert than the one whose tokens it has asked for")
        if any(each._forward_hooks or each._forward_pre_hooks for member in experts.values() for each in member.modules()):  # noqa: SLF001
            raise ChosenExpertsError("calls hooks of its experts, once for each")
        with _weights_of_each(self._compute, choice, experts[path], list(experts.values())):
            return forward(*args, **kwargs)


class _Visited(list[Expert]):
    """The experts that are hit: one, which stands for all."""

    def __getitem__(self, index: Any) -> Any:
        return _Visited(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def squeeze(self, *_: int) -> _Visited:
        """Return their numbers as tensors without dimensions."""
        return _Visited([Expert(each.dispatch, each.choice, 0) for each in self])

    flatten = squeeze


def _alike_members(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Return path of a list -> its members by their paths, of the lists whose members compute alike."""
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        forms = Forms()
        if len({forms.number(member) for member in module}) == 1 and len(set(map(id, module))) == len(module):
            found[path] = {f"{path}.{name}" if path else name: member for name, member in module.named_children()}
    return found


def _chooses(tensor: Any) -> bool:
    """Return whether a tensor may be of the experts that tokens chose."""
    return isinstance(tensor, Tensor) and tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool


def _rows_of_pairs(value: Tensor, choice: Choice, by: tuple[str, ...]) -> Tensor:
    """Return a row for each pair of a token and a choice, token by token.

    Args:
        by: what the first dimensions of the tensor are indexed by.
    """
    rest = value.shape[len(by) :]
    if by == ("token",):
        return value.repeat_interleave(choice.n_choices, 0)
    if by == ("token", "choice"):
        return value.reshape(-1, *rest)
    if by == ("choice", "token"):
        return value.transpose(0, 1).reshape(-1, *rest)
    if by == ("token", "expert") and value.dim() == 2:
        return value.gather(1, choice.known(choice.experts)).reshape(-1)
    raise ChosenExpertsError(f"indexes a tensor by {' and '.join(by)} of the pairs of tokens and experts")


def _sum_of_pairs(rows: Tensor, choice: Choice) -> Tensor:
    """Return the sum over the choices of each token."""
    ended: Tensor = end_of_expert_rows(choice.without_none(rows))
    return ended.reshape(-1, choice.n_choices, *rows.shape[1:]).sum(1)


def _rows_of_weight(weight: WeightOfEach) -> Tensor:
    """Return a row of a vector of each expert for each pair.

    Raises:
        ChosenExpertsError: it is a matrix.
    """
    if weight.stacked.dim() > 2:
        raise ChosenExpertsError("computes with a matrix of each expert other than in a product")
    rows = weight.stacked[weight.choice.known(weight.choice.group)]
    return rows if rows.dim() == 2 else rows.unsqueeze(1)


def _product(rows: Any, weight: WeightOfEach, transposed: bool) -> Tensor:
    """Return rows times the matrix of the expert of each."""
    if not isinstance(rows, Tensor) or weight.stacked.dim() != 3 or rows.dim() not in (2, 3) or (rows.dim() == 3 and rows.shape[0] != 1):
        raise ChosenExpertsError("multiplies something else than rows with a matrix of each expert")
    stacked, flat = weight.stacked, rows if rows.dim() == 2 else rows.squeeze(0)
    device = "cpu" if rows.device.type == "meta" else rows.device.type  # as which models on meta are traced
    if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        stacked, flat = stacked.to(dtype), flat.to(dtype)
    result: Tensor = grouped_mm(flat, stacked, weight.choice.group, transposed)
    return result.unsqueeze(0) if rows.dim() == 3 or weight.n_leading else result


@contextlib.contextmanager
def _weights_of_each(dispatch: Callable[..., Any], choice: Choice, traced: nn.Module, experts: Sequence[nn.Module]) -> Iterator[None]:
    """While active, the weights of one expert are those of each."""
    shadowed = []
    for name, _ in (*traced.named_parameters(), *traced.named_buffers()):
        path, _, leaf = name.rpartition(".")
        stacked = torch.stack([getattr(expert.get_submodule(path), leaf) for expert in experts])
        shadowed.append((traced.get_submodule(path), leaf, WeightOfEach(dispatch, choice, stacked)))
    for owner, leaf, weight in shadowed:
        vars(owner)[leaf] = weight
    try:
        yield
    finally:
        for owner, leaf, _ in shadowed:
            del vars(owner)[leaf]


_TRANSPOSED = tuple(getattr(Tensor, name).__get__ for name in ("T", "mT"))

_EQUALITIES = (torch.eq, Tensor.eq, Tensor.__eq__)

_SUMS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__)

_ELEMENTWISE = tuple(
    getattr(owner, name)
    for owner, names in (
        (torch, ("add", "sub", "mul", "div")),
        (Tensor, ("add", "sub", "mul", "div", "add_", "mul_")),
        (Tensor, tuple(f"__{prefix}{name}__" for prefix in ("", "r") for name in ("add", "sub", "mul", "truediv"))),
        (Tensor, ("__iadd__", "__imul__")),
    )
    for name in names
)

_KNOWN: Mapping[Any, Callable[..., Any]] = {
    F.one_hot: _ChosenExperts.one_hot,
    **dict.fromkeys((Tensor.permute, torch.permute), _ChosenExperts.permute),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.t, torch.t, *_TRANSPOSED), _ChosenExperts.transpose),
    **dict.fromkeys((Tensor.sum, torch.sum), _ChosenExperts.sum),
    **dict.fromkeys((torch.greater, torch.gt, Tensor.greater, Tensor.gt, Tensor.__gt__), _ChosenExperts.is_positive),
    **dict.fromkeys(_EQUALITIES, _ChosenExperts.is_positive),
    **dict.fromkeys((Tensor.nonzero, torch.nonzero), _ChosenExperts.nonzero),
    torch.where: _ChosenExperts.where,
    Tensor.__getitem__: _ChosenExperts.getitem,
    Tensor.__setitem__: _ChosenExperts.setitem,
    Tensor.squeeze: _ChosenExperts.squeeze,
    **dict.fromkeys((Tensor.to, Tensor.type, Tensor.float, Tensor.long, Tensor.type_as), _ChosenExperts.cast),
    **dict.fromkeys((Tensor.index_add_, Tensor.index_add, torch.index_add), _ChosenExperts.index_add),
    **dict.fromkeys(_ELEMENTWISE, _ChosenExperts.arithmetic),
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _ChosenExperts.matmul),
    F.linear: _ChosenExperts.linear,
}
"""Torch function -> what answers it for stand-ins and known tensors."""
