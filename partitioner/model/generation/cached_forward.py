"""Trace the forward of a causal language model of transformers that reads and extends a key-value cache of fixed length.

    input_ids (batch, chunk) ----------+
    attention_mask (batch, length) ----+--> logits (batch, 1, vocab) of the token at index ``last``
    position_ids (batch, chunk) -------+
    cache_position (chunk,) -----------+    keys and values of the chunk are written at ``cache_position``, in place
    keys and values of each layer -----+
         (batch, heads, length, width), resident

The model's own forward runs, with a cache whose tensors are inputs of the trace. The model makes its own mask from ``attention_mask`` and
``cache_position``, so a sliding window or a bias by distance is the model's. Entries after the last token of a chunk are not seen, and are
overwritten before they are: a chunk may be longer than the tokens in it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.tracing.export.export import TRACING
from partitioner.tracing.export.replaced import TraceRecord, devices_as_cpu, replaced
from partitioner.tracing.restore import preserve
from partitioner.tracing.trace import trace
from passes.graph.buffer_writes import verify_writes
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.ir.errors import ConfigError, TraceError
from passes.ir.graph import Autocast, ModelGraph
from passes.ir.torch_private import FakeTensorMode, tree_flatten

aten = torch.ops.aten


@dataclass(frozen=True)
class CachedTensor:
    """The keys, or the values, of one layer.

    Attributes:
        heads: number of heads.
        width: of a head.
        dtype: of the elements.
    """

    heads: int
    width: int
    dtype: torch.dtype

    def empty(self, batch: int, length: int, device: torch.device) -> Tensor:
        """Return zeros for so many rows and positions."""
        return torch.zeros(batch, self.heads, length, self.width, dtype=self.dtype, device=device)


Layer = tuple[CachedTensor, CachedTensor]


def cached_tensors(model: nn.Module, autocast: Autocast | None) -> tuple[Layer, ...]:
    """Return keys and values of every layer that caches some, found by a forward on shapes alone.

    Raises:
        TraceError: the model does not cache keys and values of (batch, heads, positions, width), or its forward fails.
    """
    device = _device_of(model)
    record = TraceRecord(cpu_devices=devices_as_cpu(autocast))
    names = ("torch.autocast.__init__", "torch.compiler._is_compiling_flag")
    with TRACING, preserve(model), replaced(record, names), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        if model.training:
            model.train(mode=False)
        cache = given_cache_type()(torch.arange(2, device=device), {})
        ids = torch.zeros(1, 2, dtype=torch.long, device=device)
        try:
            with autocast.enabled() if autocast is not None else torch.autocast("cpu", enabled=False):
                logits_of(model, type(model), ids, torch.ones_like(ids), ids, cache)
        except Exception as error:
            raise _failed(model, error) from error
    layers = [cache.tensors[index] for index in sorted(cache.tensors)]
    if not layers or any(tensor.dim() != 4 for pair in layers for tensor in pair):
        raise TraceError(
            f"{type(model).__name__} does not keep keys and values of (batch, heads, positions, width) in its past_key_values",
            remedy="generate() is for causal language models of transformers with attention; model.generate() runs any model on one device",
        )
    return tuple((_described(keys), _described(values)) for keys, values in layers)


def language_model(model: nn.Module) -> nn.Module:
    """Return the model of transformers that generates: the model itself, or the one whose layers a wrapper of peft has adapted.

    Raises:
        ConfigError: the wrapper computes with prompts of its own before the tokens.
    """
    if not _is_peft(model):
        return model
    wrapper: Any = model
    if wrapper.active_peft_config.is_prompt_learning:
        raise ConfigError(
            f"generate() does not take the prompts that {wrapper.active_peft_config.peft_type.value} of peft puts before the tokens",
            remedy="model.generate(), after model.load_state_dict(pm.full_state_dict()), decodes on one device",
        )
    adapted: nn.Module = wrapper.get_base_model()
    return adapted


def _is_peft(model: nn.Module) -> bool:
    """Return whether a model is a wrapper of peft: a model of transformers with adapters of its own has no other model inside."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _described(tensor: Tensor) -> CachedTensor:
    return CachedTensor(tensor.shape[1], tensor.shape[3], tensor.dtype)


def _failed(model: nn.Module, error: Exception) -> TraceError:
    if isinstance(error, _StateError):
        return TraceError(
            f"{type(model).__name__} caches the state of a convolution or of linear attention, which generate() does not support",
            remedy="model.generate() runs any model on one device; pm(...) computes the logits of whole prompts",
        )
    return TraceError(
        f"the forward of {type(model).__name__} with a cache of fixed length fails: {type(error).__name__}: {error}",
        remedy="model.generate() runs any model on one device",
    )


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


class _StateError(Exception):
    """A layer caches other state than keys and values."""


@functools.cache
def given_cache_type() -> Any:
    """Return a cache class of transformers whose tensors are given, and replaced, not changed, by an update."""
    base: Any = importlib.import_module("transformers.cache_utils").Cache

    class GivenCache(base):  # type: ignore[misc]
        """Keys and values of every layer; those of a layer that has none yet are those of its first update."""

        is_compileable = True  # transformers then leaves out no mask by looking at its values

        def __init__(self, position: Tensor, tensors: dict[int, tuple[Tensor, Tensor]]) -> None:
            super().__init__(layers=[])
            self.position, self.tensors = position, tensors

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            new = (key_states, value_states)
            if layer_idx in self.tensors:
                pairs = zip(self.tensors[layer_idx], new, strict=True)
                self.tensors[layer_idx] = tuple(old.index_copy(2, self.position, part.to(old.dtype)) for old, part in pairs)  # type: ignore[assignment]
            else:
                self.tensors[layer_idx] = new
            return self.tensors[layer_idx]

        def get_seq_length(self, layer_idx: int = 0) -> Any:
            return self.position[0]  # a tensor: a model that computes its mask from a number fails to trace

        def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
            return self.get_max_cache_shape(), 0

        def get_max_cache_shape(self, layer_idx: int = 0) -> int:
            return self.tensors[min(self.tensors)][0].shape[2] if self.tensors else self.position.shape[0]

        def get_conv_state(self, *_: Any, **__: Any) -> Tensor:
            raise _StateError

        update_conv_state = get_recurrent_state = update_recurrent_state = has_previous_state = get_conv_state

    return GivenCache


@functools.cache
def cache_name() -> str:
    """Return what models of transformers call the cache among arguments and results: from 5.24 on ``"cache"``."""
    output = importlib.import_module("transformers.modeling_outputs").CausalLMOutputWithPast
    return next(name for name in ("cache", "past_key_values") if name in {field.name for field in fields(output)})


def logits_of(
    model: nn.Module, kind: type[nn.Module], ids: Tensor, attention_mask: Tensor, positions: Tensor, cache: Any, last: Tensor | None = None
) -> Tensor:
    """Call the forward of a class with those of the arguments that it takes; return the logits at ``last``, or all."""
    taken = inspect.signature(type(language_model(model)).forward if _is_peft(model) else kind.forward).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    optional = {"position_ids": positions, "cache_position": cache.position, "logits_to_keep": 0 if last is None else last}
    given = {name: value for name, value in optional.items() if name in taken or (takes_all and name == "cache_position")}
    keywords = {"attention_mask": attention_mask, cache_name(): cache, "use_cache": True, "return_dict": True, **given}
    logits: Tensor = kind.forward(model, input_ids=ids, **keywords).logits
    return logits if "logits_to_keep" in given or last is None else logits.index_select(1, last)


def _with_cache_inputs(model: nn.Module, layers: Sequence[int]) -> nn.Module:
    """Return a module with the submodules and tensors of a model, whose forward takes and returns keys and values."""
    base = type(model)

    def forward(
        self: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache_position: Tensor,
        last: Tensor,
        cache: Sequence[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        held = given_cache_type()(cache_position, dict(zip(layers, cache, strict=True)))
        logits = logits_of(self, base, input_ids, attention_mask, position_ids, held, last)
        return logits, [held.tensors[index] for index in layers]

    module = copy.copy(model)
    module.__dict__.pop("forward", None)
    module.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
    return module


def trace_cached_forward(
    model: nn.Module, layers: Sequence[Layer], batch: int, chunk: int, length: int, autocast: Autocast | None, rows: int | None = None
) -> ModelGraph:
    """Trace the forward of a chunk of tokens in evaluation mode; see the module's text.

    Args:
        layers: what the model caches.
        batch: rows of the example; no power of two, so that it is no other size of the inputs.
        chunk: tokens a call.
        length: positions of the cache.
        autocast: the mixed precision.
        rows: trace for so many rows alone, if the model does not allow any number.

    Raises:
        TraceError: the model cannot be made one graph.
    """
    device = _device_of(model)
    ids = torch.zeros(batch, chunk, dtype=torch.long, device=device)
    mask = torch.ones(batch, length, dtype=torch.long, device=device)
    cache = [tuple(each.empty(batch, length, device) for each in layer) for layer in layers]
    example = (ids, mask, ids.clone(), torch.arange(chunk, device=device), torch.zeros(1, dtype=torch.long, device=device), cache)
    cached = _with_cache_inputs(model, range(len(layers)))
    graph = trace(cached, example, None, training=False, batch_size=rows, autocast=autocast, with_gradients=False)
    return _with_resident_caches(model, graph)


def _with_resident_caches(model: nn.Module, graph: ModelGraph) -> ModelGraph:
    """Return a graph that returns the logits alone, and writes the new keys and values into its inputs, which are resident."""
    results: Any = graph.graph.output_node().args[0]
    leaves = results[: len(graph.leaves)]
    caches = [leaf for leaf in graph.inputs if leaf.name.startswith("cache[")]
    target = graph.graph.__class__()
    copies: dict[Any, Any] = {}
    written = dict(zip((leaf.placeholder for leaf in caches), leaves[1:], strict=True))
    for node in graph.graph.nodes:
        if node.op == "output":
            target.output((copies[leaves[0]],))
            continue
        copies[node] = target.node_copy(node, copies.__getitem__)
        if node in written.values():
            if node.target is not aten.index_copy.default or node.args[0].name not in written or len(node.args[0].users) > 1:
                raise TraceError(
                    f"{type(model).__name__} reads its cache of keys and values besides extending it",
                    remedy="generate() is for models whose layers each extend a cache of their own",
                )
            copies[node].target = aten.index_copy_.default
    target.lint()
    verify_writes(target, "making the cache resident")
    module = LazyGraphModule(nn.Module(), target, type(model).__name__)
    inputs = tuple(replace(leaf, resident=leaf in caches) for leaf in graph.inputs)
    return replace(graph, module=module, inputs=inputs, outputs=graph.outputs[:1], output_tree=tree_flatten((0,))[1], digest=None, edits=())
