"""Share the state of the random generator before programs that draw random numbers, and after a loss that does.

Before:                            After:

    sizes = ...                        random_state = share_random_state(group=(0, 1), source=0)
    h_mb0 = self.stage0_forward()      sizes = ...
    return (loss, ())                  h_mb0 = self.stage0_forward()
                                       random_state_after_loss = share_random_state(group=(0, 1), source=1, after_loss=True)
                                       return (loss, ())

From the shared state each rank finds its own part of the numbers: those that one device draws that computes one microbatch after another,
through all stages (``partitioner.runtime.collectives.random_stream``). How many a loss draws is known only where it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from passes.graph.schemas import draws
from passes.ir.comm.primitives import draw_alike, share_random_state
from passes.ir.program import LossCall, Program, StageCall
from passes.ir.schedule import Action, ActionKind


def share_state(programs: Sequence[Program], group: tuple[int, ...], loss_rank: int | None) -> None:
    """Share the state of the random generator in the programs of all ranks, in place, if any of them draws.

    Args:
        group: all ranks.
        loss_rank: a rank that computes a loss that draws random numbers; None: the loss draws none.
    """
    if len(group) == 1 or not (loss_rank is not None or any(True for program in programs for _ in drawing_calls(program.module))):
        return
    for program in programs:
        nodes = list(program.module.graph.nodes)
        _share(next(node for node in nodes if node.op != "placeholder"), "random_state", group, 0)
        if loss_rank is not None:
            _share(nodes[-1], "random_state_after_loss", group, loss_rank, after_loss=True)


def _share(before: fx.Node, name: str, group: tuple[int, ...], source: int, **keywords: bool) -> None:
    with before.graph.inserting_before(before):
        arguments: dict[str, Any] = {"group": group, "source": source, **keywords}
        node = before.graph.create_node("call_function", share_random_state, (), arguments, name=name)
    node.meta["section"] = "random numbers"


def drawing_calls(module: fx.GraphModule) -> Iterator[tuple[fx.Node, tuple[int, int] | None]]:
    """Yield the nodes of a program whose calls draw random numbers, each with its (microbatch, stage); None: its loss does."""
    for node in module.graph.nodes:
        action = node.meta.get("section")
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, LossCall) and called.draws:
            yield node, None
        elif isinstance(action, Action) and action.kind is ActionKind.FORWARD and (node.target is draw_alike or _stage_draws(called)):
            yield node, (action.microbatch, action.stage)


def _stage_draws(called: object) -> bool:
    return isinstance(called, StageCall) and any(inner.op == "call_function" and draws(inner) for inner in called.graph.graph.nodes)
