"""Private torch API is used where the table says, and nowhere else."""

from __future__ import annotations

import functools

from tests.architecture.imports import dotted_names, imports_of
from tests.architecture.source_tree import Source, report, sources

TESTS = "tests/"
HERE = "tests/architecture/test_private_torch.py"

PRIVATE_TORCH: dict[str, tuple[str, tuple[str, ...]]] = {
    # private name: (why no public one does, the files that may use it)
    "torch.utils._pytree": (
        "structure of arguments and results: torch.export's own, which torch.utils does not export",
        (
            "benchmarks/live_storages.py",
            "partitioner/binding.py",
            "partitioner/calls.py",
            "partitioner/check/check.py",
            "partitioner/check/dot_product.py",
            "partitioner/check/original.py",
            "partitioner/experiments/measured_run.py",
            "partitioner/experiments/subject.py",
            "partitioner/loss_evidence.py",
            "partitioner/loss_form.py",
            "partitioner/loss_proof.py",
            "partitioner/losses.py",
            "partitioner/precision.py",
            "partitioner/rows.py",
            "partitioner/tracing/autograd_functions.py",
            "partitioner/tracing/caches.py",
            "partitioner/tracing/inputs.py",
            "partitioner/tracing/rehearsal.py",
            "partitioner/tracing/repeated_blocks.py",
            "partitioner/tracing/trees.py",
            "passes/aliasing.py",
            "passes/batch/values.py",
            "passes/differentiate.py",
            "passes/explicit_casts.py",
            "passes/gradient_flow.py",
            "passes/ir/graph.py",
            "passes/ir/microbatch.py",
            "passes/ir/program.py",
            "passes/localize.py",
        ),
    ),
    "torch._ops.OpOverload": (
        "the type of every operation of a traced graph; torch.ops holds its instances only",
        (
            "cost_models/calls.py",
            "cost_models/graph_cost.py",
            "cost_models/measured/kernels.py",
            "cost_models/node_work.py",
            "cost_models/operations.py",
            "cost_models/simulator/graph_reader.py",
            "cost_models/simulator/pricing.py",
            "partitioner/tracing/repeated_blocks.py",
            "passes/batch/table.py",
            "passes/batch_dimension.py",
            "passes/explicit_casts.py",
            "passes/functionalize.py",
            "passes/name_nodes.py",
            "passes/operators.py",
            "passes/printer.py",
            "passes/program_module.py",
            "passes/provenance.py",
            "passes/remove_noise.py",
            "passes/replicable.py",
            "passes/rules/call.py",
            "passes/rules/prove.py",
            "passes/rules/register.py",
            "passes/rules/table.py",
        ),
    ),
    "torch._ops.HigherOrderOperator": (
        "the type of operations that hold graphs",
        ("passes/explicit_casts.py", "passes/inline_subgraphs.py"),
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "sees below autocast, where torch.overrides does not, what operations cast; and every storage that they make",
        ("passes/explicit_casts.py", "benchmarks/live_storages.py"),
    ),
    "torch._foreach_add_": ("adds to many tensors in one call, as torch.optim does", ("passes/ir/microbatch.py",)),
    "torch._foreach_norm": (
        "what torch.nn.utils.clip_grad_norm_ calls: told apart from other functions",
        ("partitioner/part_gradient.py",),
    ),
    "torch._C.DisableTorchFunctionSubclass": (
        "calls a function on the plain tensors behind a subclass; torch's guide to subclasses has it",
        ("partitioner/part_gradient.py",),
    ),
    "torch.utils._sympy.functions": ("how symbolic sizes spell floor division and modulo", ("passes/size_expression.py",)),
    "torch.fx.experimental.proxy_tensor.make_fx": (
        "records what autograd and vmap dispatch as a graph",
        ("passes/differentiate.py", "passes/inline_vmap.py"),
    ),
    "torch.fx._lazy_graph_module": (
        "a graph module that writes its Python when it is called: no public one does",
        ("passes/lazy_graph_module.py",),
    ),
    "torch._dispatch.python.enable_python_dispatcher": (
        "runs composite operations on fake tensors without fixing their symbolic sizes",
        ("passes/known_values.py",),
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode": (
        "runs a loss, a graph for another batch, or a call that is to be timed, on shapes alone",
        ("cost_models/measured/kernels.py", "partitioner/loss_form.py", "passes/fix_batch.py"),
    ),
}


def test_private_torch_is_used_where_the_table_says() -> None:
    offences = [
        f"{place}: {name}"
        for source in sources()
        if not source.path.startswith(TESTS)
        for name, place in private_uses(source)
        if not any(covers(private, name) and source.path in files for private, (_, files) in PRIVATE_TORCH.items())
    ]
    remedy = "use public torch API; where there is none, keep it in one file, test it, and add name, reason and file to PRIVATE_TORCH"
    assert not offences, report(offences, f"{remedy} in {HERE}")


def test_the_table_lists_what_is_used() -> None:
    used = {(source.path, name) for source in sources() for name, _ in private_uses(source)}
    offences = [
        f"{file}: {private}"
        for private, (_, files) in PRIVATE_TORCH.items()
        for file in files
        if not any(path == file and covers(private, name) for path, name in used)
    ]
    assert not offences, report(offences, f"no longer used: delete it from PRIVATE_TORCH in {HERE}")


@functools.cache
def private_uses(source: Source) -> tuple[tuple[str, str], ...]:
    """Private name and place, for every import and every attribute that starts at ``torch``."""
    imported = ((found.full_name, found.node) for found in imports_of(source))
    return tuple((name, source.at(node)) for name, node in (*imported, *dotted_names(source)) if is_private(name))


def is_private(name: str) -> bool:
    """Whether a dotted name is below torch and private, or below ``torch.fx.experimental``."""
    first, *rest = name.split(".")
    if first != "torch":
        return False
    return covers("torch.fx.experimental", name) or any(part.startswith("_") and not part.startswith("__") for part in rest)


def covers(prefix: str, name: str) -> bool:
    """Whether a dotted name is the prefix or inside it."""
    return name == prefix or name.startswith(f"{prefix}.")


def test_what_is_private() -> None:
    assert is_private("torch._C._distributed_c10d")
    assert is_private("torch.utils._pytree.TreeSpec")
    assert is_private("torch.fx.experimental.proxy_tensor.make_fx")
    assert not is_private("torch.fx.Graph")
    assert not is_private("torch.__version__")
    assert not is_private("self._nodes")
