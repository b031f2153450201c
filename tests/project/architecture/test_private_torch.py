"""Private torch API is used where the table says, and nowhere else."""

from __future__ import annotations

import functools

from tests.project.architecture.imports import dotted_names, imports_of
from tests.project.architecture.source_tree import Source, report, sources

TESTS = "tests/"
HERE = "tests/project/architecture/test_private_torch.py"

PRIVATE_TORCH: dict[str, tuple[str, tuple[str, ...]]] = {
    # private name: (why no public one does, the files that may use it)
    "torch.utils._pytree": (
        "structure of arguments and results: torch.export's own, which torch.utils does not export",
        (
            "benchmarks/live_storages.py",
            "partitioner/runtime/arguments.py",
            "partitioner/model/calls.py",
            "partitioner/reports/check/check.py",
            "partitioner/reports/check/dot_product.py",
            "partitioner/reports/check/original.py",
            "partitioner/experiments/run/measured_run.py",
            "partitioner/experiments/run/subject.py",
            "partitioner/model/losses/evidence.py",
            "partitioner/model/losses/form.py",
            "partitioner/model/losses/proof.py",
            "partitioner/model/losses/losses.py",
            "partitioner/options/precision.py",
            "partitioner/options/batch_rows.py",
            "partitioner/tracing/autograd_functions.py",
            "partitioner/tracing/inputs/kv_caches.py",
            "partitioner/tracing/inputs/flatten.py",
            "partitioner/tracing/repeated/find.py",
            "partitioner/tracing/repeated/replay.py",
            "partitioner/tracing/inputs/flatten.py",
            "passes/graph/aliasing.py",
            "passes/analysis/batch/values.py",
            "passes/autograd/trace_joint.py",
            "passes/normalize/autocast/casts.py",
            "passes/normalize/autocast/operation_lists.py",
            "passes/graph/dependencies.py",
            "passes/ir/graph.py",
            "passes/ir/comm/microbatch.py",
            "passes/ir/program.py",
            "passes/spmd/localize.py",
        ),
    ),
    "torch._ops.OpOverload": (
        "the type of every operation of a traced graph; torch.ops holds its instances only",
        (
            "cost_models/ops/call.py",
            "cost_models/graph_cost.py",
            "cost_models/profiling/kernels.py",
            "cost_models/ops/cost.py",
            "cost_models/ops/cost.py",
            "cost_models/simulator/read_stage.py",
            "cost_models/simulator/pricing.py",
            "partitioner/tracing/repeated/replay.py",
            "passes/analysis/batch/table.py",
            "passes/analysis/batch_semantics.py",
            "passes/normalize/autocast/casts.py",
            "passes/normalize/autocast/operation_lists.py",
            "passes/normalize/functionalize.py",
            "passes/normalize/tidy.py",
            "passes/graph/schemas.py",
            "passes/graph/program_printer.py",
            "passes/graph/program_printer.py",
            "passes/graph/provenance.py",
            "passes/graph/canonicalize.py",
            "passes/analysis/replicable.py",
            "passes/rules/call.py",
            "passes/rules/validate.py",
            "passes/rules/registry.py",
            "passes/rules/registry.py",
        ),
    ),
    "torch._ops.HigherOrderOperator": (
        "the type of operations that hold graphs",
        ("passes/normalize/autocast/casts.py", "passes/normalize/inline_subgraphs.py"),
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "sees below autocast, where torch.overrides does not, what operations cast; and every storage that they make",
        ("passes/normalize/autocast/casts.py", "benchmarks/live_storages.py"),
    ),
    "torch._C._dispatch_get_registrations_for_dispatch_key": (
        "names the operations that torch.autocast casts on a device, which the documentation lists in part",
        ("passes/normalize/autocast/operation_lists.py",),
    ),
    "torch._foreach_add_": ("adds to many tensors in one call, as torch.optim does", ("passes/ir/comm/microbatch.py",)),
    "torch._foreach_norm": (
        "what torch.nn.utils.clip_grad_norm_ calls: told apart from other functions",
        ("partitioner/runtime/state/part_gradient.py",),
    ),
    "torch._C.DisableTorchFunctionSubclass": (
        "calls a function on the plain tensors behind a subclass; torch's guide to subclasses has it",
        ("partitioner/runtime/state/part_gradient.py",),
    ),
    "torch.utils._sympy.functions": ("how symbolic sizes spell floor division and modulo", ("passes/graph/symbolic_sizes.py",)),
    "torch.fx.experimental.proxy_tensor.make_fx": (
        "records what autograd and vmap dispatch as a graph",
        ("passes/autograd/trace_joint.py", "passes/normalize/inline_vmap.py"),
    ),
    "torch.fx._lazy_graph_module": (
        "a graph module that writes its Python when it is called: no public one does",
        ("passes/graph/lazy_graph_module.py",),
    ),
    "torch._dispatch.python.enable_python_dispatcher": (
        "runs composite operations on fake tensors without fixing their symbolic sizes",
        ("passes/graph/fake_tensors.py",),
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode": (
        "runs a loss, a graph for another batch, or a call that is to be timed, on shapes alone; makes traced values of meta tensors",
        (
            "cost_models/profiling/kernels.py",
            "partitioner/model/losses/form.py",
            "partitioner/tracing/export/meta_models.py",
            "passes/normalize/autocast/casts.py",
            "passes/normalize/specialize_batch.py",
        ),
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
