"""The inputs of a model: flattened, named as its signature names them, and resized along the batch.

Paths through nested inputs and outputs, as a user writes them.

{"loss": ., "states": (., {"key": .})}    ->    loss, states[0], states[1]['key']
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from partitioner.tracing.inputs.batch_dims import other_batch
from partitioner.tracing.inputs.kv_caches import register_caches
from passes.ir.errors import ConfigError
from passes.ir.graph import Autocast
from passes.ir.torch_private import RecordKind, TreeSpec, is_view, no_rules, tree_flatten, tree_leaves, tree_unflatten
from passes.normalize.randomness.draw_order import memory_order


@dataclass(frozen=True)
class ModelInputs:
    """``(args, kwargs)`` of one call of a model, as leaves.

    Attributes:
        leaves: in pytree order; tensors and anything else.
        names: for each leaf, its name as a user would say it: ``"input_ids"``, ``"args[0]"``, ``"mask['key']"``.
        tree: the structure of ``(args, kwargs)``.
        autocast: the mixed precision around the call.
        with_gradients: whether the call is made with gradients on.
        batch_dims: index of a leaf -> its batch dimension, or None for none, where the caller names it.
    """

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    tree: TreeSpec
    autocast: Autocast | None = None
    with_gradients: bool = True
    batch_dims: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Any, ...]:
        args, _ = tree_unflatten(self.leaves, self.tree)
        return tuple(args)

    @property
    def kwargs(self) -> dict[str, Any]:
        _, kwargs = tree_unflatten(self.leaves, self.tree)
        return dict(kwargs)

    def on_device_of(self, model: nn.Module) -> ModelInputs:
        """Return the inputs on the device of the model, if that is the meta device, or if all of them are on another one."""
        device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
        devices = {leaf.device for leaf in self.leaves if isinstance(leaf, Tensor)}
        is_elsewhere = len(devices) == 1 and not devices & {device, torch.device("meta")}
        if device is None or not (is_elsewhere or device.type == "meta"):
            return self
        return replace(self, leaves=tuple(leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves))

    def batch_layout(self, dimension: int) -> BatchLayout:
        """Return the batch dimensions of the inputs. The caller may name them; else the batch is found by its size.

        The batch size is that of the named dimensions, else that of this dimension in the first tensor that has it. Every other tensor of
        this size takes part: in the same dimension, in a named one, else in its first. Without tensors the layout is empty.

        Raises:
            ConfigError: the named dimensions have several sizes.
        """
        named = {index: dim for index, dim in self.batch_dims.items() if dim is not None}
        tensors = [(index, leaf) for index, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        size = self._size_of(named)
        if size is None:
            found = (leaf for index, leaf in tensors if leaf.ndim > dimension and index not in self.batch_dims)
            size = next((leaf.shape[dimension] for leaf in found), None)
        if size is None:
            return BatchLayout(1, ())
        batch_dims = []
        for index, leaf in tensors:
            candidates = dict.fromkeys((dimension, *named.values(), 0))
            if index in self.batch_dims:
                candidates = dict.fromkeys((named[index],) if index in named else ())
            for candidate in candidates:
                if leaf.ndim > candidate and leaf.shape[candidate] == size:
                    batch_dims.append((index, candidate))
                    break
        return BatchLayout(size, tuple(batch_dims), frozenset(named))

    def other_batch(self) -> str:
        """Return a clause for remedies that names the inputs whose batch may be in another dimension than assumed; see ``other_batch``."""
        layout = self.batch_layout(0)
        dimensions = dict(layout.dimensions)
        unnamed = ((index, leaf) for index, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and index not in self.batch_dims)
        return other_batch(((self.names[index], leaf.shape, dimensions.get(index)) for index, leaf in unnamed), layout.size)

    def _size_of(self, named: Mapping[int, int]) -> int | None:
        """Return the size of the dimensions that the caller names; None if there are none."""
        sizes = {self.names[index]: self.leaves[index].shape[dim] for index, dim in named.items()}
        if len(set(sizes.values())) > 1:
            raise ConfigError(
                f"the inputs differ in batch size, as batch_dims says: {', '.join(f'{name} has {size}' for name, size in sizes.items())}",
                remedy="name the dimension of each that is the batch, and None for one that has none",
            )
        return next(iter(sizes.values()), None)

    def other_sizes(self, layout: BatchLayout) -> dict[tuple[int, int], str]:
        """Return the dimensions besides the batch that a model may take in any size, pairs (leaf, dimension) -> its kind.

        Those of indices and masks, the dimensions of space of images, the steps of sequences of vectors, and the last one of vectors and of
        sequences: samples of a wave, or features. Sizes of zero and one are never left open.
        """
        batch_dims, names = dict(layout.dimensions), dict[tuple[int, int], str]()
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                for dimension, name in _open_dimensions(leaf, batch_dims.get(index)):
                    if leaf.shape[dimension] > 1:
                        names[index, dimension] = name
        return names

    def sizes_of(self, layout: BatchLayout, kinds: Collection[str]) -> tuple[tuple[int, int], ...]:
        """Return the dimensions of ``other_sizes`` of these kinds."""
        return tuple(pair for pair, kind in self.other_sizes(layout).items() if kind in kinds)

    def with_sizes(self, sizes: Mapping[tuple[int, int], int]) -> ModelInputs:
        """Return the inputs with other sizes, given by (leaf, dimension); the values of resized tensors are undefined."""
        resized = list(self.leaves)
        for (index, dimension), size in sizes.items():
            if resized[index].shape[dimension] != size:
                resized[index] = _resized(resized[index], dimension, size)
        return replace(self, leaves=tuple(resized))

    def with_batch(self, size: int, layout: BatchLayout) -> ModelInputs:
        """Return the inputs with another batch size; the values of resized tensors are undefined."""
        resized = list(self.leaves)
        for index, dimension in layout.dimensions:
            leaf = resized[index]
            if leaf.shape[dimension] != size:
                resized[index] = _resized(leaf, dimension, size)
        return replace(self, leaves=tuple(resized))


_SPACE = {4: ("height", "width"), 5: ("depth", "height", "width")}


def _open_dimensions(leaf: Tensor, batch_dim: int | None) -> Iterator[tuple[int, str]]:
    """Yield the dimensions of an input that may have any size, with their names; see ``ModelInputs.other_sizes``."""
    if not leaf.is_floating_point() and not leaf.is_complex():
        yield from ((dimension, "length") for dimension in range(leaf.ndim) if dimension != batch_dim)
    elif leaf.ndim == 3 and batch_dim in (0, 1):
        yield 1 - batch_dim, "length"
        yield 2, "samples"
    elif leaf.ndim == 2 and batch_dim == 0:
        yield 1, "samples"
    elif leaf.ndim == 2 and batch_dim is None and leaf.shape[0] == leaf.shape[1]:  # a mask of attention
        yield from ((dimension, "length") for dimension in range(2))
    elif leaf.ndim in _SPACE and batch_dim in (0, None):
        yield from enumerate(_SPACE[leaf.ndim], start=2)


def _resized(leaf: Tensor, dimension: int, size: int) -> Tensor:
    """Return an uninitialized tensor of another size in one dimension, with the dimensions in the same order in memory."""
    shape = list(leaf.shape)
    shape[dimension] = size
    strides, stride = [0] * leaf.dim(), 1
    for current in reversed(memory_order(leaf)):  # innermost first
        strides[current], stride = stride, stride * shape[current]
    return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)


@dataclass(frozen=True)
class BatchLayout:
    """The dimensions of the inputs that are the batch.

    Attributes:
        size: the batch size.
        dimensions: pairs (index of a leaf, its batch dimension).
        named: the leaves whose dimension the caller names.
    """

    size: int
    dimensions: tuple[tuple[int, int], ...]
    named: frozenset[int] = frozenset()

    def smaller_layouts(self) -> Iterator[BatchLayout]:
        """Yield layouts without one leaf, then without all that may be dropped: neither the first leaf nor those that the caller names."""
        others = [pair for pair in self.dimensions[1:] if pair[0] not in self.named]
        for dropped in reversed(others):
            yield replace(self, dimensions=tuple(pair for pair in self.dimensions if pair != dropped))
        if len(others) > 1:
            yield replace(self, dimensions=tuple(pair for pair in self.dimensions if pair not in others))


def flatten_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelInputs:
    """Flatten and name the inputs of one call.

    A trace would take a tensor that is passed twice for one input, and would describe the base of a view: such tensors are cloned, and so
    are tensors of inference mode.

    Raises:
        ConfigError: the model's ``forward`` does not take them.
    """
    register_caches()
    args, kwargs = tuple(args), dict(kwargs)
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"the example inputs do not fit {type(model).__name__}.forward: {error}",
            remedy=f"pass example_inputs=(...) and example_kwargs={{...}} that fit forward{signature}",
        ) from error
    for name, value in zip([*_positional_names(signature, len(args)), *kwargs], [*args, *kwargs.values()], strict=True):
        for leaf in tree_leaves(value, is_leaf=lambda each: isinstance(each, PackedSequence)):
            _check_argument(name, leaf)
    leaves, tree = tree_flatten((args, kwargs))
    names = []
    for name, value in zip([*_positional_names(signature, len(args)), *kwargs], [*args, *kwargs.values()], strict=True):
        _, value_tree = tree_flatten(value)
        names += [name + path for path in _leaf_paths(value_tree)]
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, Tensor):
            check_dense(f"the input {name}", leaf)
    return ModelInputs(tuple(_clone_shared(leaves)), tuple(names), tree)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ConfigError for a sparse, nested or quantized tensor, or one of a class with rules of its own."""
    if tensor.is_quantized:
        raise ConfigError(f"{name} is quantized ({tensor.dtype}), and a graph cannot hold it", remedy="pass x.dequantize()")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested (of several shapes)" if tensor.is_nested else f"sparse ({tensor.layout})"
        remedy = "a padded tensor and a mask" if tensor.is_nested else "it dense, x.to_dense(), or its indices and values as a tensor each"
        raise ConfigError(f"{name} is {kind} and has no rows to divide", remedy=f"pass {remedy}")
    if has_own_rules(tensor):
        raise ConfigError(
            f"{name} is a {type(tensor).__name__}, a class of tensors that computes by rules of its own, which a graph does not have",
            remedy="pass a plain tensor: x.as_subclass(torch.Tensor), or the tensors that it is made of",
        )


def has_own_rules(tensor: Tensor) -> bool:
    """Return whether a tensor is of a class that computes by rules of its own: quantized weights of torchao, for example.

    Those of torch that are private (fake tensors) and torchvision's images, boxes and masks compute as plain tensors do.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    classes = type(tensor).__mro__[: type(tensor).__mro__.index(Tensor)]
    return any(
        vars(cls).get(rules, no_rules) is not no_rules and not cls.__module__.startswith(("torch._", "torchvision."))
        for cls in classes
        for rules in ("__torch_function__", "__torch_dispatch__")
    )


def _clone_shared(leaves: list[Any]) -> Iterator[Any]:
    """Yield the leaves; tensors that came before, views, and tensors of inference mode are cloned."""
    seen: set[int] = set()
    for leaf in leaves:
        is_shared = isinstance(leaf, Tensor) and (id(leaf) in seen or leaf.is_inference() or is_view(leaf))
        seen.add(id(leaf))
        with torch.inference_mode(mode=False):
            yield leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_shared else leaf


def _positional_names(signature: inspect.Signature, count: int) -> list[str]:
    """Return the names of the first ``count`` positional inputs; those of ``*args`` are ``args[0]``, ``args[1]``, ..."""
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{index}]" for index in range(count - len(names))]
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names[:count]


def _leaf_paths(tree: TreeSpec) -> tuple[str, ...]:
    """Return the path of each leaf from the root: ``""``, ``"[0]"``, ``"['key']"``, ``".field"``, or several of them joined."""
    if tree.is_leaf():
        return ("",)
    return tuple(step + rest for step, child in zip(_child_paths(tree), tree.children(), strict=True) for rest in _leaf_paths(child))


def output_names(tree: TreeSpec) -> tuple[str, ...]:
    """Return the path of each leaf of a result; a key or field at the top is bare: ``"logits"``, ``"states[0]"``."""
    if tree.is_leaf():
        return ("",)
    names = []
    for step, child in zip(_child_paths(tree), tree.children(), strict=True):
        bare = step.removeprefix(".")
        if step.startswith("['"):
            bare = step[2:-2]
        names += [bare + path for path in _leaf_paths(child)]
    return tuple(names)


def _child_paths(tree: TreeSpec) -> list[str]:
    """Return the path of each child of a node: its key in a mapping, its field in a dataclass or named tuple, else its index."""
    children = tree.num_children
    keys: Any = tree.context
    if isinstance(tree.type, type) and issubclass(tree.type, dict):
        keys = _keys_of_mapping(tree)
        if keys is not None:
            return [f"[{key!r}]" for key in keys]
    if isinstance(tree.type, type) and dataclasses.is_dataclass(tree.type) and len(dataclasses.fields(tree.type)) == children:
        return [f".{field.name}" for field in dataclasses.fields(tree.type)]
    if isinstance(keys, RecordKind):
        return [f".{name}" for name in keys.names]
    fields = getattr(keys if isinstance(keys, type) else tree.type, "_fields", None)
    if fields is not None and len(fields) == children:
        return [f".{field}" for field in fields]
    return [f"[{index}]" for index in range(children)]


def _keys_of_mapping(tree: TreeSpec) -> list[Any] | None:
    """Return the keys of a mapping of any registered type, if its children are in their order; else None."""
    try:  # the type's own flatten is not known here: unflatten the numbers of the leaves, and read the result
        mapping = tree_unflatten(list(range(tree.num_leaves)), tree)
        keys = list(mapping)
        leaf_numbers = [leaf for key in keys for leaf in tree_flatten(mapping[key])[0]]
    except (TypeError, ValueError, KeyError):
        return None
    return keys if len(keys) == tree.num_children and leaf_numbers == sorted(leaf_numbers) else None


_TAKEN = (Tensor, int, float, bool, str, type(None))
"""Types of leaves that a trace takes."""

_REMEDIES = (
    ("BlockMask", "create it in forward, create_block_mask(...) of the inputs; or pass the mask as a tensor"),
    ("PackedSequence", "pass the padded tensor, and compute its mask from the lengths"),
    ("Cache", "pass a DynamicCache, or none; pm.generate(...) keeps a cache of each rank's own"),
    ("ndarray", "pass a tensor: torch.from_numpy(array)"),
    ("Image", "pass a tensor of its pixels"),
    ("Generator", "draw from the default generator, and seed it: torch.manual_seed(0)"),
    ("set", "pass a list or a tuple"),
    ("dict_", "pass a list or a tuple"),
    ("generator", "pass a list or a tuple"),
    ("range", "pass its ends as numbers, or a list"),
    ("function", "keep it in the model, as an attribute"),
    ("method", "keep it in the model, as an attribute"),
    ("Module", "make it a submodule of the model: self.layer = layer"),
)
"""Part of the name of a class -> the remedy, for the class and those that it is derived from."""

_REMEDY = "pass tensors, numbers and strings, in tuples, lists, dicts or dataclasses; keep other objects in the model, as attributes"


def _check_argument(name: str, value: Any) -> None:
    """Raise ConfigError for a leaf of the arguments that is neither a tensor nor a number, a string or None."""
    kind = type(value)
    if (isinstance(value, _TAKEN) and not _is_enum(kind)) or kind.__name__ in ("SymInt", "SymFloat", "SymBool"):
        return
    classes = ["Module"] if isinstance(value, nn.Module) else [each.__name__ for each in kind.__mro__]
    remedy = next((remedy for part, remedy in _REMEDIES if any(part in each for each in classes)), _REMEDY)
    if _is_enum(kind):
        remedy = "pass its value, a number or a string"
    raise ConfigError(
        f"{name} is {'an' if kind.__name__[:1].lower() in 'aeiou' else 'a'} {kind.__name__}, which a trace cannot take", remedy=remedy
    )


def _is_enum(kind: type) -> bool:
    return hasattr(kind, "__members__")
