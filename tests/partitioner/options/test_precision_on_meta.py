"""Mixed precision of models on the meta device: the casts of the device that is planned for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner import PartitionedModel, partition
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError
from passes.ir.graph import Autocast, ModelGraph
from passes.normalize.autocast.operation_lists import CUDA_OPERATIONS, operations_of, overload
from tests.partitioner.options.test_precision import many_operations
from tests.support.models.zoo import case_named
from tests.support.running.slow_values import slow

DTYPES = (torch.bfloat16, torch.float16)


def described(graph: ModelGraph) -> list[tuple[Any, ...]]:
    """Return each node, with the dtypes, shapes and devices of its results."""
    found = []
    for node in graph.graph.nodes:
        tensors = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        values = [(tensor.dtype, tuple(map(str, tensor.shape)), tensor.device.type, tensor.requires_grad) for tensor in tensors]
        found.append((node.name, str(node.target), str(node.args), str(node.kwargs), values))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_are_those_of_the_model_on_the_cpu(dtype: torch.dtype) -> None:
    model, inputs = many_operations()
    expected = described(trace(model, inputs, autocast=Autocast("cpu", dtype)))
    assert described(trace(copy.deepcopy(model).to("meta"), inputs, autocast=Autocast("cpu", dtype, planned_for="cpu"))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gpt", "unet", "encoder_decoder", "batch_norm_convolution", "gpt2", "llama", "resnet", "swin"])
def test_casts_of_models(name: str, dtype: torch.dtype) -> None:
    case = case_named(name)
    instance = case.build(dtype=torch.float32)
    with torch.device("meta"):
        on_meta = case.model().to(torch.float32).train()
    expected = described(trace(instance.model, instance.args, instance.kwargs, autocast=Autocast("cpu", dtype)))
    assert described(trace(on_meta, instance.args, instance.kwargs, autocast=Autocast("cpu", dtype, planned_for="cpu"))) == expected


# -- the list of a GPU ---------------------------------------------------------------------------------------------------------------


class _StoppedError(Exception):
    """Casts of operations are found."""


class _Casts(TorchDispatchMode):
    """Records what a call casts before it computes, or the dtype that it then asks for, and stops there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: dict[int, torch.dtype] = {}
        self.named: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "prim":  # asks for the device
            return func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._to_copy.default:
            self.named = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.dtype)), None)
            raise _StoppedError
        self.casts[id(args[0])] = (kwargs or {})["dtype"]
        return func(*args, **(kwargs or {}))


def _argument(kind: str, dtype: torch.dtype, device: str) -> Any:
    """Something of the type that a schema asks for; what sizes fit is not asked before arguments are cast."""
    if "Tensor" in kind:
        tensor = torch.zeros(2, 2, dtype=torch.long if kind == "List[Optional[Tensor]]" else dtype, device=device)  # indices
        return [tensor] if kind.startswith("List") else tensor
    plain = {"number": 1, "int": 1, "float": 1.0, "bool": False, "str": "fro"}
    of_list = next((value for name, value in plain.items() if name in kind.removeprefix("List")), None)
    return [of_list] if kind.startswith("List") else of_list


def _casts(
    operation: OpOverload, dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> tuple[list[torch.dtype | None], torch.dtype | None]:
    """Return the cast of each tensor of a call, the first of one dtype and all others of another; and the dtype that the call asks for."""
    asked = [argument for argument in operation._schema.arguments if "Tensor" in str(argument.type) or not argument.has_default_value()]
    given = {argument.name: _argument(str(argument.type), dtypes[min(place, 1)], device) for place, argument in enumerate(asked)}
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
    # Casts come before the kernel, which may refuse the arguments made up here.
    with torch.no_grad(), _Casts() as seen, contextlib.suppress(_StoppedError, RuntimeError, NotImplementedError, IndexError):
        operation(**given)
    return [seen.casts.get(id(tensor)) for tensor in tensors], seen.named


def _under(device: str, dtype: torch.dtype | None) -> None:
    """Turn autocast on, also for a device that there is none of, or off."""
    torch.set_autocast_enabled(device, dtype is not None)
    torch.set_autocast_dtype(device, dtype or torch.bfloat16)
    torch.set_autocast_cache_enabled(dtype is None)


RECURRENT = {"lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"}
"""Cast inside by PyTorch, where cuDNN computes them."""

BOTH = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]


def test_the_list_has_what_pytorch_casts_on_a_gpu() -> None:
    registered = {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")}
    assert registered - set(CUDA_OPERATIONS) == set()
    assert set(CUDA_OPERATIONS) - registered <= RECURRENT | {"_thnn_fused_lstm_cell", "cudnn_convolution", "cudnn_convolution_transpose"}


@pytest.mark.parametrize("name", sorted(set(CUDA_OPERATIONS) - RECURRENT - {"binary_cross_entropy"}))
def test_the_list_casts_as_pytorch_does_on_a_gpu(name: str) -> None:
    """Its own kernels cast fake tensors of a GPU, also where there is none."""
    operation = overload(name)
    if operation is None:
        pytest.skip("this version of PyTorch has no such operation")
    cast = set()
    for dtypes in BOTH:
        found = {}
        for device in ("cuda", "cpu"):
            with FakeTensorMode(), operations_of(Autocast("cpu", torch.bfloat16, planned_for="cuda")):
                _under(device, torch.bfloat16)
                try:
                    found[device] = _casts(operation, dtypes, device)
                finally:
                    _under(device, None)
        casts, named = found["cuda"]
        if named == torch.float32 and CUDA_OPERATIONS[name] == "float32 unless a dtype is named":
            casts = [torch.float32 if dtypes[0] == torch.bfloat16 else None]  # which a cast in front says as well
        assert found["cpu"][0][: len(casts)] == casts, dtypes
        cast.update(casts)
    assert cast - {None}, "an operation of the list casts something"


def test_the_list_is_gone_afterwards() -> None:
    x = torch.randn(2, 2).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = torch.softmax(x, -1).dtype
        with operations_of(Autocast("cpu", torch.bfloat16, planned_for="cuda")):
            assert torch.softmax(x, -1).dtype == torch.float32
        assert torch.softmax(x, -1).dtype == before


# -- plans -----------------------------------------------------------------------------------------------------------------------------


def planned(precision: str | None, mode: str | Mapping[str, int] = "data", cluster: str | None = "h100:1x4") -> PartitionedModel:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(4096, 16)
    return partition(model, 4, mode, example_inputs=(x,), precision=precision, cluster=cluster, progress=False)


def dtype_of_norm(pm: PartitionedModel) -> torch.dtype:
    """Return the dtype of the first rank's normalization."""
    modules = [pm.graph(0), *(module for module in pm.graph(0).modules() if isinstance(module, torch.fx.GraphModule))]
    nodes = [node for module in modules for node in module.graph.nodes if "layer_norm" in str(node.target)]
    value = nodes[0].meta["val"]
    found: torch.dtype = (value[0] if isinstance(value, tuple | list) else value).dtype
    return found


@pytest.mark.parametrize("mode", ["pipeline", *slow("data", {"data": 2, "tensor": 2})], ids=str)
@pytest.mark.parametrize("precision", ["bf16-mixed", *slow("16-mixed")])
def test_plans_graphs_and_simulation(precision: str, mode: str | Mapping[str, int]) -> None:
    pm = planned(precision, mode)
    pm.verify()
    assert pm.explain()
    assert len(pm.graphs) == 4
    assert pm.simulate().step_time > 0
    with pytest.raises(ConfigError, match="the model is on the meta device"):
        pm(torch.randn(4096, 16))
    with pytest.raises(ConfigError, match="the model is on the meta device"):
        pm.train_step(torch.randn(4096, 16), target=torch.randn(4096, 4), loss_fn=nn.functional.mse_loss)


@pytest.mark.slow
def test_the_planned_device_decides_what_is_cast() -> None:
    """A GPU normalizes in single precision, a CPU in that of its input."""
    assert dtype_of_norm(planned("bf16-mixed")) == torch.float32
    assert dtype_of_norm(planned("bf16-mixed", cluster=None)) == torch.bfloat16
    assert dtype_of_norm(planned("bf16-mixed", cluster="cpu:1x4")) == torch.bfloat16


@pytest.mark.slow
def test_it_runs_once_it_is_initialized() -> None:
    """As the model does under autocast, which casts by the list of the CPU in one and by that of the planned device in the other."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    x, target = torch.randn(8, 16), torch.randn(8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
        loss = nn.functional.mse_loss(expected, target)
    for cluster in (None, "h100:1x2"):
        pm = partition(
            copy.deepcopy(model).to("meta"), 2, "data", example_inputs=(x,), precision="bf16-mixed", cluster=cluster, progress=False
        )
        pm.load_state_dict(model.state_dict())
        torch.testing.assert_close(pm(x), expected)
        torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss), loss.detach(), rtol=1e-2, atol=0)


@pytest.mark.slow
def test_memory_counts_the_bytes_of_the_precision() -> None:
    whole, mixed = (planned(precision).simulate().memory[0] for precision in (None, "bf16-mixed"))
    assert mixed.parameters == whole.parameters
    assert mixed.activations < 0.9 * whole.activations


# -- a model of transformers, as it comes --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_blocks_of_llama_405b_with_the_default_cache() -> None:
    """Two of its 126 blocks, with its vocabulary: 10 billion parameters."""
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=128256, num_hidden_layers=2))
        tokens = torch.zeros(16, 4096, dtype=torch.int64)
    assert model.config.use_cache
    mode = {"pipeline": 2, "tensor": 2}
    pm = partition(model, 4, mode, example_kwargs={"input_ids": tokens}, precision="bf16-mixed", cluster="h200:1x4", progress=False)
    simulation = pm.simulate()
    flops = 3 * 2 * tokens.numel() * 2 * 16384 * (2 * 16384 + 2 * 1024 + 3 * 53248)  # of the blocks' projections, forward and backward
    assert flops / 4 / 1e15 < simulation.step_time < 10 * flops / 4 / 1e15
    assert len(simulation.peak_memory) == 4
    with pytest.raises(ConfigError, match="meta device"):
        pm(input_ids=tokens)
