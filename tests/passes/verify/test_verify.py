"""The static proof: it accepts every program that is emitted, and names the node that was tampered with."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator

import pytest
import sympy
import torch
from _pytest.mark import ParameterSet
from torch import fx

from partitioner.schedules.catalog import SCHEDULES
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.comm.primitives import all_reduce, receive, send, wait
from passes.ir.errors import VerificationError
from passes.ir.program import Program, StoreGradients
from passes.verify.programs import verify
from passes.verify.value_specs import Pending, describe_values
from tests.support.models.case import Case
from tests.support.models.zoo import ZOO, case_named
from tests.support.running.programs import programs
from tests.support.running.slow_values import slow

N_RANKS = (2, 3, 4)

QUICK = {
    *(("residual", 2, schedule) for schedule in ("1F1B", "ZB1P")),
    *(("residual", 4, "ZBV"), ("returns_loss", 2, "ZB1P")),
}
"""Cases that always run: one case under schedules of whole and of split backwards and one on a V, and one that computes its own loss."""


def matrix() -> Iterator[ParameterSet]:
    """Yield one case under every pair of ranks and schedule, the rest under one: every lowering is verified anyway."""
    for row, case in enumerate(ZOO):
        own = (N_RANKS[row % 3], list(SCHEDULES)[(row + row // 6) % 6])
        for n_ranks, schedule in itertools.product(N_RANKS, SCHEDULES) if case.name == "residual" else (own,):
            always = (case.name, n_ranks, schedule) in QUICK
            yield pytest.param(case, n_ranks, schedule, id=f"{case.name}-{n_ranks}-{schedule}", marks=() if always else pytest.mark.slow)


@pytest.mark.parametrize(("case", "n_ranks", "schedule"), list(matrix()))
def test_every_emitted_program_is_accepted(case: Case, n_ranks: int, schedule: str) -> None:
    for kind, found in programs(case, schedule, n_ranks, case.microbatches(3), batch_size=8).items():
        verify(found)
        for program in found:
            _check_bytes(program, kind)


def _check_bytes(program: Program, kind: str) -> None:
    """Check that communication nodes state the bytes that the proof finds, at the traced batch size."""
    specs = describe_values(program)
    batch = program.module.meta["batch_size"]
    values = {specs.batch: batch, **dict(zip(specs.sizes, microbatch_sizes(batch, max(len(specs.sizes), 1)), strict=False))}
    for node in program.module.graph.nodes:
        if node.target in (send, receive, all_reduce):
            described = specs.of[node.args[0] if node.target is send else node]
            described = described.value if isinstance(described, Pending) else described
            tensors = described if isinstance(described, list) else [described]
            if any(tensor.dtype is None for tensor in tensors):
                continue
            sizes = [[int(sympy.sympify(size).subs(values)) for size in tensor.shape] for tensor in tensors]
            moved = sum(torch.Size(size).numel() * tensor.dtype.itemsize for size, tensor in zip(sizes, tensors, strict=True))
            assert node.meta["bytes"] == moved, (kind, program.rank, node.name)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_programs_are_accepted(recompute: str) -> None:
    for found in programs(case_named("gpt"), "ZB1P", 3, 4, recompute=recompute, input_gradients=True).values():  # type: ignore[arg-type]
        verify(found)


# -- tampering -------------------------------------------------------------------------------------------------------------------------


def tied(schedule: str = "1F1B", n_ranks: int = 3) -> list[Program]:
    """Return a training step with activations of different shapes, a skip and a tied weight, fresh to be tampered with."""
    return fresh(programs(case_named("gpt"), schedule, n_ranks, 2)["train_step"])


def fresh(found: tuple[Program, ...]) -> list[Program]:
    return [dataclasses.replace(program, module=copy.deepcopy(program.module)) for program in found]


def nodes(program: Program, function: Callable[..., object] | None = None) -> list[fx.Node]:
    return [node for node in program.module.graph.nodes if function is None or node.target is function]


def named(program: Program, pattern: str) -> fx.Node:
    return next(node for node in nodes(program) if re.fullmatch(pattern, node.name))


def refused(found: list[Program], *words: str) -> str:
    with pytest.raises(VerificationError) as caught:
        verify(found)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_untouched_programs_are_accepted() -> None:
    verify(tied())


def communications() -> Iterator[tuple[int, str]]:
    for program in programs(case_named("gpt"), "1F1B", 3, 2)["train_step"]:
        for function in (send, receive, all_reduce):
            yield from ((program.rank, node.name) for node in nodes(program, function))


@pytest.mark.parametrize("first", [True, *slow(False)], ids=["first", "others"])
def test_every_lost_communication_is_named(*, first: bool) -> None:
    """Each send and each all_reduce is left out once: the first of each kind, and all others."""
    original = programs(case_named("gpt"), "1F1B", 3, 2)["train_step"]
    met: set[object] = set()
    for rank, name in communications():
        kind = named(original[rank], re.escape(name)).target
        is_first = kind not in met
        met.add(kind)
        if is_first != first:
            continue
        found = list(original)
        found[rank] = fresh((original[rank],))[0]
        node = named(found[rank], re.escape(name))
        if node.target is receive:
            continue
        peer = original[node.kwargs["destination"]] if node.target is send else None  # type: ignore[index]
        if node.target is all_reduce:
            (waiting,) = node.users
            replacement = list(node.args[0])  # type: ignore[arg-type]
            for user in list(waiting.users):
                user.args = (replacement, *user.args[1:])
            found[rank].module.graph.erase_node(waiting)
        found[rank].module.graph.erase_node(node)
        receiver = None if peer is None else _receiver(peer, rank, node)
        refused(found, f"rank {rank}" if receiver is None else receiver)


def _receiver(peer: Program, rank: int, sent: fx.Node) -> str:
    return next(node.name for node in nodes(peer, receive) if (node.kwargs["source"], node.kwargs["tag"]) == (rank, sent.kwargs["tag"]))


@pytest.mark.slow
def test_every_changed_tag_source_and_dtype_is_named() -> None:
    original = programs(case_named("gpt"), "1F1B", 3, 2)["train_step"]
    for rank, name in communications():
        for change in (_other_tag, _other_dtype, _other_peer):
            found = list(original)
            found[rank] = fresh((original[rank],))[0]
            node = named(found[rank], re.escape(name))
            tag = node.kwargs.get("tag")
            if node.target is all_reduce or (change is _other_dtype and (node.target is send or name == "receive_loss")):
                continue
            change(node)
            message = refused(found)
            assert name.removeprefix("receive_") in message or f"message {tag} " in message, (name, message)


def _other_tag(node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "tag": 99}


def _other_dtype(node: fx.Node) -> None:
    node.args = (node.args[0], torch.int16)


def _other_peer(node: fx.Node) -> None:
    key = "source" if node.target is receive else "destination"
    node.kwargs = {**node.kwargs, key: 7}


@pytest.mark.slow
def test_a_receive_of_another_microbatch_size() -> None:
    """Equal for even batches, wrong for a batch of 9: only symbols show it."""
    found = tied()
    first, second = (named(found[1], f"receive_.*_mb{index}") for index in (0, 1))
    first.args, second.args = second.args, first.args
    message = refused(found, "receive_")
    assert "size_mb0" in message or "not well formed" in message


def test_receives_posted_in_another_order() -> None:
    """The right messages, but a transport without tags would mix them up."""
    found = tied()
    first, second = [node for node in nodes(found[1], receive) if node.kwargs["source"] == 0][:2]
    first.prepend(second)
    refused(found, f"{second.name} of rank 1 expects message 1", "from rank 0 to rank 1")


@pytest.mark.slow
def test_swapped_tags() -> None:
    found = fresh(programs(case_named("unet"), "1F1B", 2, 2)["train_step"])
    first, second = nodes(found[0], send)[:2]
    first.kwargs, second.kwargs = second.kwargs, first.kwargs
    refused(found, "_mb0_to_rank1 of rank 0 sends float64", "expects float64")


def test_waiting_before_sending_is_a_circle() -> None:
    found = tied(n_ranks=2)
    sent = nodes(found[0], send)[0]
    waiting = nodes(found[0], wait)[0]
    pending = waiting.args[0]
    assert isinstance(pending, fx.Node)
    for part in (pending, waiting):
        sent.prepend(part)
    message = refused(found, "circle", f"rank 0 waits at {waiting.name}", "rank 1 waits at")
    assert sent.name in message


def test_a_pending_value_that_nobody_waits_for() -> None:
    found = tied()
    last = named(found[0], "loss")
    for user in list(last.users):
        user.args = (None,)
    found[0].module.graph.erase_node(last)
    refused(found, "receive_loss of rank 0 is never waited for")


@pytest.mark.slow
def test_waiting_twice() -> None:
    found = tied()
    once = named(found[0], "loss")
    with found[0].module.graph.inserting_after(once):
        found[0].module.graph.create_node("call_function", wait, once.args, name="again")
    refused(found, "receive_loss of rank 0 is waited for more than once: loss and again")


def test_reading_what_is_still_pending() -> None:
    found = tied()
    waited = nodes(found[1], wait)[0]
    pending = waited.args[0]
    user = next(iter(waited.users))
    user.replace_input_with(waited, pending)  # type: ignore[arg-type]
    refused(found, user.name)


@pytest.mark.slow
def test_waiting_for_a_value() -> None:
    found = tied()
    waited = nodes(found[1], wait)[1]
    waited.args = (nodes(found[1], wait)[0],)
    refused(found, f"rank 1, {waited.name}: waits for something that is neither a receive nor a collective")


def test_a_tag_used_twice() -> None:
    found = tied()
    first, second = nodes(found[0], send)[:2]
    second.kwargs = first.kwargs
    refused(found, first.name, second.name, "both message")


@pytest.mark.slow
def test_a_message_to_itself() -> None:
    found = tied()
    first = nodes(found[1], send)[0]
    first.kwargs = {**first.kwargs, "destination": 1}
    refused(found, f"rank 1, {first.name}: there is no other rank 1")


@pytest.mark.slow
def test_another_group() -> None:
    found = tied()
    node = nodes(found[0], all_reduce)[0]
    node.kwargs = {"group": (0, 1)}
    refused(found, node.name)
    node.kwargs = {"group": (1, 2)}
    refused(found, f"rank 0, {node.name}: the group (1, 2) is not a set of ranks that holds rank 0")
    node.kwargs = {"group": (0, 7)}
    refused(found, f"rank 0, {node.name}: the group (0, 7) has ranks that are not there")


@pytest.mark.slow
def test_other_tensors_in_a_group() -> None:
    found = tied()
    node = nodes(found[0], all_reduce)[0]
    (gradient,) = node.all_input_nodes
    with node.graph.inserting_before(node):
        shorter = node.graph.call_function(torch.zeros, ((3,),), {"dtype": torch.float64, "device": torch.device("cpu")})
    node.args = ([shorter],)
    (waiting,) = node.users
    for user in list(waiting.users):
        user.args = ([gradient],)
    refused(found, f"{node.name} of rank 0 gives float64 (3) as tensor 0 where {node.name} of rank 2 expects float64 (")


def test_a_stage_called_with_values_of_other_shapes() -> None:
    found = fresh(programs(case_named("unet"), "1F1B", 2, 2)["train_step"])
    call = next(node for node in nodes(found[1]) if node.op == "call_module" and "forward" in node.name and len(node.args) > 2)
    call.args = (*call.args[:-2], call.args[-1], call.args[-2])
    refused(found, f"rank 1, {call.name}: gives ", "where the stage's")


@pytest.mark.slow
def test_a_stage_called_with_too_few_values() -> None:
    found = tied()
    call = next(node for node in nodes(found[1]) if node.op == "call_module" and "forward" in node.name)
    call.args = call.args[:-1]
    refused(found, f"rank 1, {call.name}: gives ")


def test_a_gradient_stored_for_another_parameter() -> None:
    found = tied()
    store = named(found[1], "stage1_store_gradients")
    module = found[1].module.get_submodule(str(store.target))
    assert isinstance(module, StoreGradients)
    module.names = module.names[::-1]
    refused(found, "rank 1, stage1_store_gradients: stores", "as the gradient of")


@pytest.mark.slow
def test_a_graph_that_reads_what_stands_behind() -> None:
    found = tied()
    graph = found[0].module.graph
    call = next(node for node in nodes(found[0]) if node.op == "call_module")
    call.append(call.args[0])  # type: ignore[arg-type]
    with pytest.raises(VerificationError, match="the graph of rank 0 is not well formed"):
        verify(found)
    assert graph is found[0].module.graph


@pytest.mark.slow
def test_a_program_for_every_rank() -> None:
    with pytest.raises(VerificationError, match=r"there are programs for ranks \[0, 2\]"):
        verify([program for program in tied() if program.rank != 1])
