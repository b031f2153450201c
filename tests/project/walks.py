"""The files and functions that a call enters: ``python -m tests.project.walks`` prints a table, ``--files`` the files too.

A walk counts the frames that the interpreter enters in ``partitioner``, ``passes`` and ``cost_models``, here of a small model in a pipeline
of two ranks. That of a step ends where the runtime starts the programs. "moves" are calls and returns from one file to another. "tracer"
counts the files of ``partitioner.tracing``, and the files that call into them. "outside phases" leaves out the insides of tracer, planner,
schedules, passes and cost models, which are read on their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from partitioner.runtime.embedded import EmbeddedRuntime

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("partitioner", "passes", "cost_models")
_TRACER = "partitioner/tracing/"
_PHASES = (_TRACER, "partitioner/planner/", "partitioner/schedules/", "passes/", "cost_models/")


@dataclass(frozen=True)
class Walk:
    """The files and functions that one call enters.

    Attributes:
        entered: (file, function) of every frame, in order, each once.
        n_moves: calls and returns from one file to another.
        callers_of_tracer: the files that call into the tracer.
    """

    entered: tuple[tuple[str, str], ...]
    n_moves: int
    callers_of_tracer: frozenset[str]

    @property
    def files(self) -> tuple[str, ...]:
        """The files, in the order in which they are entered."""
        return tuple(dict.fromkeys(file for file, _ in self.entered))

    @property
    def outside_phases(self) -> tuple[str, ...]:
        """Those of the files that are not inside of a phase, which has an entrance and an order of its own."""
        return tuple(file for file in self.files if not file.startswith(_PHASES))

    @property
    def traced_files(self) -> tuple[str, ...]:
        """Those of the files that are the tracer's."""
        return tuple(file for file in self.files if file.startswith(_TRACER))


def walk(call: Callable[[], object], until: CodeType | None = None) -> Walk:
    """Run a call and return its walk; ``until``: the function at which the walk ends, itself not part of it."""
    entered: dict[tuple[str, str], None] = {}
    stack, callers, n_moves, has_ended = [""], set[str](), 0, False

    def observe(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal n_moves, has_ended
        file = _file_of(frame.f_code)
        has_ended = has_ended or frame.f_code is until
        if file is None or has_ended:
            return
        if event == "call":
            entered.setdefault((file, frame.f_code.co_qualname))
            n_moves += stack[-1] != file
            if file.startswith(_TRACER) and not stack[-1].startswith(_TRACER):
                callers.add(stack[-1])
            stack.append(file)
        elif event == "return" and len(stack) > 1:
            stack.pop()
            n_moves += stack[-1] != file

    before = sys.getprofile()
    sys.setprofile(observe)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Walk(tuple(entered), n_moves, frozenset(callers))


def _file_of(code: CodeType) -> str | None:
    """Return the path of a function below the root, if it is one of ours."""
    path = code.co_filename
    if not path.startswith(str(_ROOT)):
        return None
    relative = path[len(str(_ROOT)) + 1 :]
    return relative if relative.partition("/")[0] in _PACKAGES else None


def walks() -> dict[str, Walk]:
    """Return the walks by name: ``partition``, the first step, later steps, and later calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    x, target = torch.randn(8, 8), torch.randn(8, 4)
    made: list[PartitionedModel] = []
    runtime = EmbeddedRuntime.run.__code__

    def step() -> Tensor:
        return made[0].train_step(x, target=target, loss_fn=nn.functional.mse_loss)

    def make() -> None:
        made.append(partition(model, devices=2, mode="pipeline", example_inputs=(x,)))

    make()
    made.clear()
    return {
        "partition": walk(make),
        "train_step, made": walk(step, runtime),
        "train_step, found": walk(step, runtime),
        "call, made": walk(lambda: made[0](x), runtime),
        "call, found": walk(lambda: made[0](x), runtime),
    }


def _text(found: dict[str, Walk], *, with_files: bool) -> str:
    """Return the table of the walks, each followed by its files if asked for."""
    lines = [f"{'':20} {'files':>6} {'outside phases':>15} {'functions':>10} {'moves':>6}   tracer"]
    for name, each in found.items():
        tracer = f"{len(each.traced_files)} files, called from {len(each.callers_of_tracer)}"
        lines.append(f"{name:20} {len(each.files):6} {len(each.outside_phases):15} {len(each.entered):10} {each.n_moves:6}   {tracer}")
        for file in each.files if with_files else ():
            functions = [function for its, function in each.entered if its == file]
            lines.append(f"    {file:66} {len(functions):3}  {functions[0]}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="the files and functions that a call enters")
    parser.add_argument("--files", action="store_true", help="name the files of each walk, and the first function in each")
    sys.stdout.write(_text(walks(), with_files=parser.parse_args().files))
