"""Draw on every rank the random numbers of one device, which computes one microbatch after another, each through all stages.

    one device        mb 0: stage 0, stage 1    mb 1: stage 0, stage 1    then the loss, then the script
    its generator     s0       s1       s2               s3           s4
    rank 0            draws    skips    draws ...        skips, ends in s4
    rank 1            skips    draws    ...

A forward begins in the state in which the one before it in this order ends, whatever the schedule: a rank that has not run that one
skips its numbers. On a GPU that moves an offset. On a CPU, numbers of uniform distributions are skipped as words of the generator; others
are drawn and dropped, because normal numbers come in pairs, of which one may be stored.

Some operators draw as many numbers as the values of their arguments ask for (Poisson), which only a rank that has the values knows. Where
stages are on different ranks, a forward with such draws takes one number as its seed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from passes.emit.random_state import drawing_calls
from passes.graph.schemas import draws, packet
from passes.graph.symbolic_sizes import traced_size
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.comm.primitives import draw_alike
from passes.ir.errors import PartitionWarning, level_of_caller
from passes.ir.program import Program, StageCall
from passes.ir.tensor_spec import RowCount
from passes.ir.torch_private import tree_leaves
from passes.normalize.randomness.functional_rng import dropout_mask, dropout_mask_with_state

aten = torch.ops.aten

Draws: TypeAlias = tuple[int, int]
"""The random numbers of one forward: its microbatch and stage."""

_UNIFORM = frozenset({
    aten.alpha_dropout, aten.bernoulli, aten.dropout, aten.feature_dropout, aten.native_dropout, aten.rand, aten.rand_like, aten.randint,
    aten.randint_like, aten.random, aten.scaled_dot_product_attention, aten.uniform,
    dropout_mask.overloadpacket, dropout_mask_with_state.overloadpacket,
})  # fmt: skip
"""Operators that take the same number of words from a CPU's generator whatever its state."""

_VALUE_DEPENDENT = frozenset({
    aten.binomial, aten.poisson, aten.rrelu, aten.rrelu_with_noise, aten.rrelu_with_noise_functional,
    aten._sample_dirichlet, aten._standard_gamma,  # noqa: SLF001
})  # fmt: skip
"""Operators that draw as many numbers as values of their arguments ask for."""

_CHUNK = 1 << 16
"""How many words are skipped at once."""


class ProgramDraws:
    """The random numbers that the programs of all ranks draw in one run.

    Attributes:
        order: the forwards that draw, in the order of one device.
        seeded: those of them that take one number as their seed.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        calls_of_ranks = [list(drawing_calls(program.module)) for program in programs]
        self._calls: dict[Draws, list[tuple[Program, fx.Node]]] = {}
        for program, calls in zip(programs, calls_of_ranks, strict=True):
            own: dict[Draws, list[tuple[Program, fx.Node]]] = {}
            for node, forward in calls:
                if forward is not None:
                    own.setdefault(forward, []).append((program, node))
            # Ranks that share a forward draw the same numbers: the calls of the first of them stand for all.
            self._calls = {**own, **self._calls}
        self.order = tuple(sorted(self._calls))
        n_forwards = [len({forward for _, forward in calls if forward is not None}) for calls in calls_of_ranks]
        self.seeded = frozenset[Draws]()
        # A rank without some forwards cannot count draws that depend on values: these forwards take a seed.
        if any(count < len(self.order) for count in n_forwards):
            self.seeded = frozenset(forward for forward in self.order if self._is_value_dependent(forward))
        self._n_microbatches = 1 + max((microbatch for microbatch, _ in self.order), default=0)
        self._skipped: dict[tuple[int, int, torch.device], list[_Skipped]] = {}

    def _is_value_dependent(self, forward: Draws) -> bool:
        """Return whether the number of a forward's draws depends on values; warn about it."""
        for _, node in self._nodes(forward):
            function = _drawing_function(node)
            if packet(function) in _VALUE_DEPENDENT or function.namespace not in ("aten", "partitioner") or _has_counted_rows(node):
                warnings.warn(
                    f"stage {forward[1]} draws random numbers by {function}, and how many depends on values that other ranks lack: its "
                    "numbers, and those after it, are the same in every runtime, but not those of one device for the same seed",
                    PartitionWarning,
                    stacklevel=level_of_caller(),
                )
                return True
        return False

    def _nodes(self, forward: Draws) -> list[tuple[Program, fx.Node]]:
        """Return the nodes that draw in a forward, each in its program or in the graph of its stage."""
        found = []
        for program, call in self._calls[forward]:
            stage = program.module.get_submodule(str(call.target)) if call.op == "call_module" else None
            inner = stage.graph.graph.nodes if isinstance(stage, StageCall) else [call]
            found += [(program, node) for node in inner if node is call or (node.op == "call_function" and draws(node))]
        return found

    def skipped(self, forward: Draws, batch: int, device: torch.device) -> list[_Skipped]:
        """Return the draws of a forward to skip on a device, for a batch of so many rows."""
        microbatch, stage = forward
        rows = microbatch_sizes(batch, self._n_microbatches)[microbatch]
        key = stage, rows, device
        if key not in self._skipped:
            self._skipped[key] = [_Skipped(_concrete(node, batch, rows, device), device) for _, node in self._nodes(forward)]
        return self._skipped[key]


class _Generators(NamedTuple):
    """The states of the generators of the CPU and of a GPU."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def read(cls, device: torch.device) -> _Generators:
        """Return the states of the CPU's generator, and of the device's if that is a GPU."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def set(self, device: torch.device) -> None:
        """Set the generators of the CPU and of a GPU to these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)


class RandomStream:
    """The random numbers of one run on the ranks of this process, which start from the states of the generators.

    Args:
        draws: of the programs.
        batch: the rows that each program takes.
        devices: of the ranks of this process.
    """

    def __init__(self, draws: ProgramDraws, batch: int, devices: Sequence[torch.device]) -> None:
        self._draws = draws
        self._batch = batch
        self._devices = tuple(dict.fromkeys(devices))
        self.restart()

    def restart(self) -> None:
        """Start from the present states of the generators."""
        self._starts = {0: _Generators.read(self._devices[0])}
        self._paused: dict[Draws | int, _Generators] = {}
        self._ended: set[Draws] = set()
        self._entered: tuple[Draws | int, torch.device] | None = None
        self._loss: int | None = None
        self._is_over = False

    def enter(self, forward: Draws, device: torch.device) -> None:
        """Let a device draw the numbers of a forward from here on, after those that the forward has drawn before."""
        if forward in self._ended:  # other ranks of this process have drawn for this one
            return
        self._switch(forward, self._draws.order.index(forward), device)

    def enter_loss(self, rank: int, device: torch.device) -> None:
        """Let a device draw the numbers of the loss of a rank, which follow those of all forwards."""
        self._loss = rank
        self._switch(rank, len(self._draws.order), device)

    def leave(self, forward: Draws, device: torch.device) -> None:
        """Note that a forward has drawn all its numbers."""
        if forward in self._ended:
            return
        self._pause()
        self._ended.add(forward)
        end = self._paused.pop(forward, None)
        if end is not None and forward not in self._draws.seeded:
            self._starts[self._draws.order.index(forward) + 1] = end

    def end(self) -> None:
        """Leave the generators as the loss does where this process has computed it; all processes take that state next."""
        if self._loss is not None:
            self.finish()
        self._is_over = True

    def finish(self) -> None:
        """Leave the generators of this process as one device does after all forwards, and the loss."""
        if self._is_over or (self._loss is None and not self._draws.order):
            return
        self._pause()
        end = self._start(len(self._draws.order), self._devices[0]) if self._loss is None else self._paused[self._loss]
        for device in self._devices:
            end.set(device)

    def _switch(self, key: Draws | int, place: int, device: torch.device) -> None:
        if self._entered == (key, device):
            return
        self._pause()
        paused = self._paused.pop(key, None)
        (paused or self._start(place, device)).set(device)
        if paused is None and key in self._draws.seeded:
            _seed(device)
        self._entered = key, device

    def _pause(self) -> None:
        """Keep the states of the generators for the forward that was drawing."""
        if self._entered is not None:
            key, device = self._entered
            self._paused[key] = _Generators.read(device)
            self._entered = None

    def _start(self, place: int, device: torch.device) -> _Generators:
        """Return the states in which the forward at a place of the order begins, by skipping those before it that have not run here."""
        known = max(each for each in self._starts if each <= place)
        if known < place:
            self._starts[known].set(device)
        for each in range(known, place):
            forward = self._draws.order[each]
            if forward in self._draws.seeded:
                _next_seed()
            else:
                for draw in self._draws.skipped(forward, self._batch, device):
                    draw.skip()
            self._starts[each + 1] = _Generators.read(device)
        return self._starts[place]


def _next_seed() -> int:
    """Draw a number for use as a seed from the CPU's generator."""
    return int(torch.randint(2**62, ()))


def _seed(device: torch.device) -> None:
    """Seed the generators of the CPU and of a GPU by the next number of the CPU's."""
    seed = _next_seed()
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


# -- draws without their results -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Filled:
    """Stands for a tensor argument: its values do not matter, so that it is filled with ones."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, device: torch.device) -> Tensor:
        """Return it as a tensor."""
        return torch.ones(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _Call:
    """A call that draws random numbers, and how many they are."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    count: int
    on_cpu: bool


class _Skipped:
    """Moves a generator as a call moves it, without the result of the call where that is cheaper.

    The first skip calls the function, and finds by how much the state has moved. Calls with equal arguments move it alike: this is assumed
    of GPUs, whose generators count, and of the operators in ``_UNIFORM``.
    """

    def __init__(self, call: _Call, device: torch.device) -> None:
        self._call = call
        self._device = torch.device("cpu") if call.on_cpu else device
        self._moves: int | None = None
        self._is_measured = False

    def skip(self) -> None:
        """Move the generator."""
        if not self._is_measured:
            self._measure()
        elif self._moves is None:
            self._draw()
        else:
            self._move(self._moves)

    def _draw(self) -> None:
        def concrete(argument: Any) -> Any:
            if isinstance(argument, tuple | list):
                return [concrete(each) for each in argument]
            if isinstance(argument, torch.device):
                return self._device
            return argument.tensor(self._device) if isinstance(argument, _Filled) else argument

        keywords = {name: concrete(value) for name, value in self._call.keywords.items()}
        self._call.function(*map(concrete, self._call.arguments), **keywords)

    def _measure(self) -> None:
        """Draw once, and note by how much that moves the generator."""
        self._is_measured = True
        if self._device.type == "cuda":
            before = _offset(torch.cuda.get_rng_state(self._device))
            self._draw()
            self._moves = _offset(torch.cuda.get_rng_state(self._device)) - before
            return
        before_draw = torch.get_rng_state()
        self._draw()
        if packet(self._call.function) not in _UNIFORM:
            return
        after = torch.get_rng_state()
        for words in (2 * self._call.count, self._call.count, 0, 1, 2):
            torch.set_rng_state(before_draw)
            self._move(words)
            if torch.equal(torch.get_rng_state(), after):
                self._moves = words
                return
        torch.set_rng_state(after)

    def _move(self, steps: int) -> None:
        if self._device.type == "cuda":
            state = torch.cuda.get_rng_state(self._device)
            _offset_of(state).add_(steps)
            torch.cuda.set_rng_state(state, self._device)
            return
        words = torch.empty(min(steps, _CHUNK))
        for start in range(0, steps, _CHUNK):
            words[: steps - start].random_()  # one word for each


def _offset_of(state: Tensor) -> Tensor:
    """Return the part of the state of a GPU's generator that counts what was drawn: a seed comes first."""
    return state.view(torch.int64)[1:2]


def _offset(state: Tensor) -> int:
    return int(_offset_of(state))


def _drawing_function(node: fx.Node) -> Any:
    return node.args[0] if node.target is draw_alike else node.target


def _has_counted_rows(node: fx.Node) -> bool:
    """Return whether the size of a tensor of a call is known only when a program runs."""
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    sizes = [traced_size(size) for value in values if isinstance(value, Tensor) for size in value.shape]
    return any(not isinstance(size, int) and size.atoms(RowCount) for size in sizes)


def _concrete(node: fx.Node, batch: int, rows: int, device: torch.device) -> _Call:
    """Return a call of a program, or of a stage, with sizes for a batch, of which a microbatch has ``rows``."""

    def number(size: int | torch.SymInt) -> int:
        expression = traced_size(size)
        return expression if isinstance(expression, int) else int(expression.subs(dict.fromkeys(expression.free_symbols, rows)))

    def value_of(source: fx.Node) -> Any:
        value = source.meta.get("val")
        if isinstance(value, Tensor):
            return _Filled(tuple(map(number, value.shape)), value.dtype)
        if source.op == "placeholder":
            return batch if is_in_program else rows
        if isinstance(value, int | torch.SymInt):
            return number(value)
        assert callable(source.target), "sizes are computed from sizes"
        return source.target(*fx.map_arg(source.args, value_of), **fx.map_arg(source.kwargs, value_of))

    is_in_program = node.target is draw_alike
    arguments: Any = fx.map_arg(node.args, value_of)
    results = [each for each in tree_leaves(node.meta["val"]) if isinstance(each, Tensor)]
    count = math.prod(map(number, results[0].shape))
    if packet(node.target) is aten.scaled_dot_product_attention:
        query, key, *_ = arguments
        count = math.prod(query.shape[:-1]) * key.shape[-2]
    on_cpu = device.type == "cpu" or results[0].device.type == "cpu"
    return _Call(
        _drawing_function(node), tuple(arguments[2:] if is_in_program else arguments), fx.map_arg(node.kwargs, value_of), count, on_cpu
    )
