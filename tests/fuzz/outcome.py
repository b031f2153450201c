"""Run a case beside the model in one piece and say how it ended."""

from __future__ import annotations

import copy
import functools
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from partitioner import PartitionedModel, PartitionError, VerificationError, partition
from tests.fuzz.derivative import is_fault_of_model
from tests.fuzz.generator import Case
from tests.fuzz.program import Program, build, loss_of, make_inputs

__all__ = ["Outcome", "Reference", "run_case"]

TOLERANCE = 1e-9
"""Of a value, relative to the largest element of its tensor, and with 1e-3 of it to the largest of all tensors compared."""

NOISE = 1e-14
"""A relative change of inputs and parameters, some roundings large: what it changes in a value is allowed besides."""

DRAWS = 6
"""How often noise is drawn for a value that differs by more than the first noise changes.

A normalisation of what rounding leaves of zero amplifies it by any factor: one draw may move such a value by a thousandth of the next.
"""

ROUNDING = 1e-15
"""Of the largest number that the model computes on the way, some roundings large: allowed besides, for sums whose terms cancel."""

AS_INFINITE = 1e12
"""Numbers from here on stand for infinity."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: ``"equal"``, ``"refused"``, ``"wrong"``, ``"raw"``, ``"timeout"``, or ``"invalid"`` where the model itself does not run.
        reason: what a failure is recognised by while it is reduced: what differs, which error, where.
        detail: figures or a traceback.
    """

    kind: str
    reason: str = ""
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in {"wrong", "raw", "timeout"}


class DifferenceError(AssertionError):
    """Something is not what the model in one piece gives."""

    def __init__(self, what: str, detail: str) -> None:
        self.what = what
        self.detail = detail
        super().__init__(f"{what}: {detail}")


@dataclass
class Reference:
    """One side of a comparison: the model, or what ``partition`` made of it."""

    module: nn.Module
    is_partitioned: bool
    noise: float = 0.0
    draw: int = 1

    def inputs(self, program: Program, rows: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
        """The program's inputs, and its target."""
        args, kwargs, target = make_inputs(program, rows)
        disturb([each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)], self.noise, self.draw)
        return args, kwargs, target

    @property
    def partitioned(self) -> PartitionedModel:
        assert isinstance(self.module, PartitionedModel)
        return self.module

    def step(self, inputs: tuple[tuple[Any, ...], dict[str, Any], Tensor]) -> Tensor:
        """One training step: the loss, gradients left on the parameters."""
        args, kwargs, target = inputs
        torch.manual_seed(1)  # of dropout, on both sides
        if self.is_partitioned:
            loss: Tensor = self.partitioned.train_step(*args, target=target, loss_fn=loss_of, **kwargs)
            return loss
        loss = loss_of(self.module(*args, **kwargs), target)
        loss.backward()
        return loss.detach()

    def gradients(self) -> Mapping[str, Tensor | None]:
        if self.is_partitioned:
            found: Mapping[str, Tensor | None] = self.partitioned.full_gradients()
            return found
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}

    def state(self) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self.partitioned.full_state_dict() if self.is_partitioned else self.module.state_dict()
        return found


def run_case(case: Case, on_reference: Callable[[], None] = lambda: None) -> Outcome:
    """The case's outcome. The default dtype is float64 meanwhile.

    Args:
        on_reference: called when the unpartitioned model has run: a process that ends before has been ended by PyTorch alone.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _run(case, on_reference)
    finally:
        torch.set_default_dtype(before)


def _run(case: Case, on_reference: Callable[[], None]) -> Outcome:
    try:
        model = build(case.program)
        expected = list(_observations(Reference(copy.deepcopy(model), is_partitioned=False), case, None))
        with LargestValue() as largest:
            allowed = [_disturbed_observations(model, case, 1)]
    except Exception as error:  # noqa: BLE001  a reduced program need not run
        return Outcome("invalid", type(error).__name__, str(error))
    on_reference()
    wanted: Any = None
    got: Any = None
    try:
        args, kwargs, _ = make_inputs(case.program, case.program.rows)
        pm = partition(model, example_inputs=args, example_kwargs=kwargs, **case.configuration.arguments())
        observed = _observations(Reference(pm, is_partitioned=True), case, pm)
        for index, ((what, wanted), (_, got)) in enumerate(zip(expected, observed, strict=True)):
            _compare_with_noise(what, wanted, got, index, allowed, functools.partial(_disturbed_observations, model, case), largest.value)
    except PartitionError as error:
        # A proof that fails is a defect of a pass, and no plan was given that could be wrong.
        is_ours = isinstance(error, VerificationError) or str(error).startswith("plan.")
        return Outcome("raw" if is_ours else "refused", f"{type(error).__name__}: {refusal_class(str(error))}", str(error))
    except DifferenceError as error:
        if error.what in ("gradients of parameters", "gradients of inputs") and is_fault_of_model(case.program, model, wanted, got):
            return Outcome("invalid", "PyTorch's gradient is no derivative", error.detail)
        return Outcome("wrong", error.what, error.detail)
    except Exception as error:  # noqa: BLE001  whatever comes from inside is what we look for
        return Outcome("raw", f"{type(error).__name__} at {_place(error)}", traceback.format_exc())
    return Outcome("equal")


def _disturbed_observations(model: nn.Module, case: Case, draw: int) -> list[tuple[str, Any]]:
    """What the model in one piece does with inputs and parameters that are moved by noise."""
    disturbed = Reference(copy.deepcopy(model), is_partitioned=False, noise=NOISE, draw=draw)
    disturb(list(disturbed.module.parameters()), NOISE, draw)
    return list(_observations(disturbed, case, None))


def _compare_with_noise(
    what: str, wanted: Any, got: Any, index: int, allowed: list[list[tuple[str, Any]]], draw: Callable[[int], Any], largest: float
) -> None:
    """Compare observation ``index``; ``allowed`` has those of each noise so far, and gets more where these do not explain a difference.

    Raises:
        DifferenceError: no noise changes the model's own value as much.
    """
    if any(_is_explained(what, wanted, got, noisy[index][1], largest) for noisy in allowed):
        return
    while len(allowed) < DRAWS:
        allowed.append(draw(len(allowed) + 1))
        if _is_explained(what, wanted, got, allowed[-1][index][1], largest):
            return
    compare(what, wanted, got, allowed[0][index][1], ROUNDING * largest)


def _is_explained(what: str, wanted: Any, got: Any, noisy: Any, largest: float) -> bool:
    try:
        compare(what, wanted, got, noisy, ROUNDING * largest)
    except DifferenceError:
        return False
    return True


def _observations(side: Reference, case: Case, pm: Any) -> Any:
    """What both sides do, one observation after the other; they are compared in turn."""
    program, module = case.program, side.module
    args, kwargs, target = inputs = side.inputs(program, program.rows)
    leaf_inputs = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point()]
    if program.seed % 2:
        for each in leaf_inputs:
            each.requires_grad_()
    torch.manual_seed(0)
    output = module(*args, **kwargs)
    yield "output", tree_map_only(Tensor, lambda each: each.detach().clone(), output)
    yield "buffers after a call", module_buffers(side)
    loss = loss_of(output, target)
    if loss.requires_grad:
        loss.backward()
    gradients = copied(side.gradients())
    yield "gradients of parameters", gradients
    yield "gradients of inputs", [each.grad for each in leaf_inputs]
    module.zero_grad()
    if any(gradient is not None for gradient in gradients.values()):
        inputs = side.inputs(program, program.rows)
        yield "loss of train_step", side.step(inputs)
        yield "gradients of train_step", copied(side.gradients())
        torch.optim.SGD(module.parameters(), lr=0.01).step()
        module.zero_grad()
        yield "loss of a second step", side.step(inputs)
        yield "gradients of a second step", copied(side.gradients())
        side.step(inputs)
        yield "gradients of two steps", copied(side.gradients())
    yield "state", copied(side.state())
    args, kwargs, _ = side.inputs(program, program.other_rows)
    torch.manual_seed(2)
    if pm is None:
        yield "output of another batch", module(*args, **kwargs)
        return
    try:
        yield "output of another batch", module(*args, **kwargs)
    except PartitionError:
        yield "output of another batch", None


def module_buffers(side: Reference) -> Mapping[str, Tensor | None]:
    """Buffers by their names in the state dict."""
    names = {name for name, _ in side.module.named_buffers()} if not side.is_partitioned else None
    state = side.state()
    return copied({name: value for name, value in state.items() if names is None or name in names})


def copied(values: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The values as they are now."""
    return {name: None if value is None else value.detach().clone() for name, value in values.items()}


def disturb(values: Sequence[Tensor], noise: float, draw: int = 1) -> None:
    """Change floating values in place by a relative noise, that of a draw; those that are all zero by as much as if they were one.

    A bias that starts at zero is not zero after the first step: what a normalisation makes of it then is as large as of anything else.
    """
    generator = torch.Generator().manual_seed(draw)
    for value in values:
        if noise and value.is_floating_point():
            scale = value.detach().abs() if value.any() else torch.ones_like(value.detach())
            value.detach().add_(noise * scale * torch.randn(value.shape, generator=generator))


class LargestValue(TorchDispatchMode):
    """Records the largest number that a model computes, backward included.

    Terms that are much larger than their sum leave an error of rounding in it that depends on the order in which they are added.

    Attributes:
        value: its magnitude; numbers that stand for infinity, as masks of attention do, do not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and each.is_floating_point() and each.numel():
                magnitudes = each.detach().abs()
                self.value = max(self.value, float(magnitudes.masked_fill(~(magnitudes < AS_INFINITE), 0).max()))
        return results


def compare(what: str, wanted: Any, got: Any, noisy: Any = None, rounding: float = 0.0) -> None:
    """Raise DifferenceError where two observations are not equal, beyond what noise changes in the model's own.

    Args:
        noisy: what the disturbed model gives.
        rounding: what another order of additions may change.
    """
    if what == "output of another batch" and got is None:
        return
    if what == "buffers after a call":
        got = {name: got[name] for name in wanted if name in got}
    if isinstance(wanted, dict) and isinstance(got, dict):
        if wanted.keys() != got.keys():
            raise DifferenceError(f"names in {what}", f"{sorted(wanted.keys() ^ got.keys())}")
        got = {name: got[name] for name in wanted}
    wanted_leaves, wanted_structure = tree_flatten(wanted)
    got_leaves, got_structure = tree_flatten(got)
    noisy_leaves = tree_flatten(wanted if noisy is None else noisy)[0]
    if wanted_structure != got_structure:
        raise DifferenceError(f"structure of {what}", f"{wanted_structure} and {got_structure}")
    names = list(wanted) if isinstance(wanted, dict) else list(range(len(wanted_leaves)))
    largest = max((_magnitude(each) for each in wanted_leaves if isinstance(each, Tensor) and each.numel()), default=0.0)
    for place, (one, other, changed) in enumerate(zip(wanted_leaves, got_leaves, noisy_leaves, strict=True)):
        _compare_leaf(what, names[place] if place < len(names) else place, one, other, changed, largest, rounding)


def _compare_leaf(what: str, name: Any, wanted: Any, got: Any, noisy: Any, largest: float, rounding: float) -> None:
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        if wanted is not got and wanted != got:
            raise DifferenceError(what, f"{name}: {_short(wanted)} wanted, {_short(got)} got")
        return
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        raise DifferenceError(
            f"shape of {what}", f"{name}: {tuple(wanted.shape)} {wanted.dtype} wanted, {tuple(got.shape)} {got.dtype} got"
        )
    if not wanted.numel():
        return
    allowed = TOLERANCE * (_magnitude(wanted) + 1e-3 * largest) + 1e-14 + rounding
    difference = float((wanted.detach().double() - got.detach().double()).abs().max())
    if not difference <= allowed and not difference <= allowed + 10 * _distance(wanted, noisy):
        raise DifferenceError(what, f"{name}: largest difference {difference:.3e} of {_magnitude(wanted):.3e}")


def _magnitude(value: Tensor) -> float:
    """The largest magnitude of a tensor; a bool counts as 0 or 1."""
    return float(value.detach().double().abs().max())


def _distance(wanted: Tensor, noisy: Any) -> float:
    """The largest difference of two finite tensors; 0 where they cannot be compared."""
    if not isinstance(noisy, Tensor) or noisy.shape != wanted.shape:
        return 0.0
    found = float((wanted.detach().double() - noisy.detach().double()).abs().max())
    return found if math.isfinite(found) else 0.0


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _place(error: BaseException) -> str:
    """The last frame of ours that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if any(f"/{name}/" in frame.filename for name in ("partitioner", "passes", "cost_models"))]
    last = ours[-1] if ours else frames[-1]
    return f"{'/'.join(last.filename.split('/')[-2:])}:{last.name}"


def refusal_class(text: str) -> str:
    """The first line of a refusal without names and numbers."""
    line = re.sub(r"'[^']*'|\"[^\"]*\"", "..", text.splitlines()[0])
    line = re.sub(r"\b[vx]?\w*\d[\w.]*", "N", line)
    return line[:110]
