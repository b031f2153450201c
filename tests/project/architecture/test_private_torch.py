"""Private torch API is used in one file, which says why, and is what that file expects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch._dynamo
import torch.distributed as dist

from passes.graph.symbolic_sizes import traced_size
from passes.ir import torch_private
from passes.ir.tensor_spec import row_count
from tests.project.architecture.imports import dotted_names, imports_of
from tests.project.architecture.source_tree import Source, report, sources

TESTS = "tests/"
GATEWAY = "passes/ir/torch_private.py"


def test_private_torch_is_used_in_one_file() -> None:
    offences = [
        f"{place}: {name}"
        for source in sources()
        if not source.path.startswith(TESTS) and source.path != GATEWAY
        for name, place in private_uses(source)
    ]
    assert not offences, report(offences, f"use public torch API; where there is none, name it in {GATEWAY}, with the reason, and test it")


def test_what_the_gateway_names_is_used() -> None:
    used = {found.full_name.rpartition(".")[2] for source in sources() if source.path != GATEWAY for found in imports_of(source)}
    assert not set(torch_private.__all__) - used, f"{GATEWAY} names what nothing uses any more"


def test_what_torch_has_is_what_is_expected_of_it() -> None:
    """Names that torch keeps and gives another meaning."""
    x = torch.ones(2, 3)
    assert [torch_private.is_view(each) for each in (x, x.t(), x[:1], x.clone())] == [False, True, True, False]
    ran: list[bool] = []
    leaf = torch.ones(2, requires_grad=True)
    accumulate = torch.autograd.graph.get_gradient_edge(leaf).node
    other = torch.ones(2, requires_grad=True)
    for inputs in (None, [other]):
        product = leaf * other
        product.register_hook(lambda _: ran.append(torch_private.will_run(accumulate)))
        torch.autograd.backward(product.sum(), inputs=inputs)
    assert ran == [True, False]
    view, before = x.detach()[:1], torch_private.version_of(x)
    packed: list[torch.Tensor] = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        packed.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        with torch_private.without_saved_tensors_hooks():
            leaf.exp()
        assert not packed
        leaf.exp()
    assert len(packed) == 1
    torch_private.foreach_add_([x], [x.clone()])
    assert torch_private.version_of(view) == torch_private.version_of(x) != before
    assert x.tolist() == [[2.0] * 3] * 2
    assert [norm.item() for norm in torch_private.foreach_norm([torch.tensor([3.0, 4.0])])] == [5.0]
    assert "aten::linear" in torch_private.registered_operators("AutocastCPU")
    leaves, tree = torch_private.tree_flatten({"a": (x, None)})
    assert isinstance(tree, torch_private.TreeSpec)
    assert torch_private.tree_unflatten(leaves, tree) == {"a": (x, None)}
    assert isinstance(torch.ops.aten.add.Tensor, torch_private.OpOverload)
    assert isinstance(torch.ops.higher_order.cond, torch_private.HigherOrderOperator)
    with torch_private.FakeTensorMode(), torch_private.enable_python_dispatcher():
        assert torch.ones(2, 3).sum(0).shape == (3,)
    module = torch_private.make_fx(torch.sin)(x)
    with torch_private.use_lazy_graph_module(True):
        assert isinstance(torch_private.TorchLazyGraphModule.from_graphmodule(module), torch.fx.GraphModule)
    assert torch_private.FloorDiv(7, 2) == 3
    assert torch_private.Mod(7, 2) == 1
    with torch_private.DisableTorchFunctionSubclass():
        assert x.sum() == 12
    assert torch_private.running_ddp() is None
    with torch.nn.parallel.DistributedDataParallel._inside_ddp_forward(cast(Any, ddp := object())):
        assert torch_private.running_ddp() is ddp


def test_the_last_node_of_a_trace() -> None:
    found: list[torch.fx.Node | None] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        found.append(torch_private.last_traced_node())
        return y

    assert torch_private.last_traced_node() is None
    torch_private.make_fx(traced)(torch.ones(2))
    assert [node and node.target for node in found] == [torch.ops.aten.cos.default]


def test_process_groups_beside_those_of_new_group() -> None:
    group = torch_private.process_group("gloo", dist.HashStore(), 0, 1, timedelta(seconds=20))  # type: ignore[attr-defined]
    x = torch.ones(2)
    for work in (dist.all_reduce(x, group=group, async_op=True), dist.broadcast(x, group_src=0, group=group, async_op=True)):
        assert work is not None
        work.wait()
    assert (x.tolist(), group.rank(), group.size()) == ([1.0, 1.0], 0, 1)


def test_graphs_of_dynamo_say_where_they_come_from() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def collect(module: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = layer(x)
        torch._dynamo.graph_break()
        return torch.sin(x)

    layer = torch.nn.Linear(2, 2)
    torch.compile(function, backend=collect)(torch.ones(2))
    first, last = graphs[0], graphs[-1]
    sources = [torch_private.dynamo_source(node) for node in first.graph.find_nodes(op="placeholder")]
    names = [source.rpartition(".")[2] for source in sources if "._parameters[" in source]
    assert names == [
        "_parameters['weight']",
        "_parameters['bias']",
    ]
    assert "L['x']" in sources
    assert any(node.target is torch_private.set_grad_mode for node in first.graph.nodes)
    reason, file, _ = torch_private.graph_break(first) or ("", "", 0)
    assert not torch_private.is_transformed()
    assert ("graph_break" in reason, file, torch_private.is_resumed(first)) == (True, __file__, False)
    assert (torch_private.graph_break(last), torch_private.is_resumed(last)) == (None, True)


@functools.cache
def private_uses(source: Source) -> tuple[tuple[str, str], ...]:
    """Private name and place, for every import and every attribute that starts at ``torch``."""
    imported = ((found.full_name, found.node) for found in imports_of(source))
    return tuple((name, source.at(node)) for name, node in (*imported, *dotted_names(source)) if is_private(name))


def is_private(name: str) -> bool:
    """Return whether a dotted name is below torch and private, or below ``torch.fx.experimental``."""
    first, *rest = name.split(".")
    if first != "torch":
        return False
    return name.startswith("torch.fx.experimental.") or any(part.startswith("_") and not part.startswith("__") for part in rest)


def test_what_is_private() -> None:
    assert is_private("torch._C._distributed_c10d")
    assert is_private("torch.utils._pytree.TreeSpec")
    assert is_private("torch.fx.experimental.proxy_tensor.make_fx")
    assert not is_private("torch.fx.Graph")
    assert not is_private("torch.__version__")
    assert not is_private("self._nodes")


def test_an_open_size_is_equal_to_no_other() -> None:
    symbol = row_count(2)
    with torch_private.FakeTensorMode():
        like = torch.ones(2)
        one, other = (like.new_empty(torch_private.open_size(each, like), 3) for each in (symbol, row_count(2)))
    assert traced_size(one.t().shape[1]) == symbol
    assert one.shape[0].node.hint != other.shape[0].node.hint  # type: ignore[attr-defined]  # of open sizes
