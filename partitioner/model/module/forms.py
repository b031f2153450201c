"""All forms of a partitioned model: by modes, by the autocast around a call, and by the arguments that a call passes.

pm(input_ids)                                    as in the example
pm.eval(); pm(input_ids)                         in other modes
pm(input_ids, labels=labels)                     with other arguments       traced when first called so; same plan, same tensors
pm(input_ids, scale=2.0)                         with another value of what is no tensor, or tensors of another dtype
with torch.autocast("cpu", torch.bfloat16): ...  in mixed precision
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from partitioner.model.module.copies import copied_form
from partitioner.model.module.modes import Form, session_of_tracing
from partitioner.model.module.questions import refuse_call_in_ddp
from partitioner.model.session import Session, Tracing
from partitioner.options.precision import check_scaler
from partitioner.runtime.arguments import BoundInputs, check_shapes
from passes.ir.checked_arguments import described
from passes.ir.errors import ConfigError, PartitionWarning, TraceError, level_of_caller
from passes.ir.graph import Autocast, Input
from passes.ir.torch_private import pytree

__all__ = ["Forms", "at_sizes"]

_Modes = tuple[bool, ...]

_FORMS_ANNOUNCED = 8
"""Forms in the same modes at which a warning says that each is traced."""

_FORMS_KEPT = 32
"""Forms in the same modes that are kept."""


class Forms:
    """Finds the form for a call, and traces the model for the first call of its kind.

    Args:
        first: the session of the model as it was partitioned.
    """

    def __init__(self, first: Session) -> None:
        self._first = first
        self._signature = inspect.signature(first.original.forward)
        self._is_alone = len(first.runtime.local_ranks) == first.runtime.n_ranks
        device_type = next((each.device.type for each in first.original.parameters()), "cpu")
        self._is_meta = device_type == "meta"  # then it is traced on the CPU, with the casts of the device that runs it
        self._device_type = first.runtime.devices[first.runtime.local_ranks[0]].type if self._is_meta else device_type
        self.first = Form.of(first)
        """As it was partitioned."""
        self._forms: dict[tuple[_Modes, Autocast | None], list[Form]] = {self._key(first.tracing): [self.first]}

    def in_modes(self, modes: _Modes) -> Form:
        """Return the form in these modes for a call as in the example."""
        return self._form(dataclasses.replace(self._first.tracing, modes=modes))

    def of_call(self, modes: _Modes, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Form:
        """Return the form for a call in these modes, inside of the present autocast. Every rank must call it.

        With one rank a process, None may stand for a tensor that the rank does not read.

        Raises:
            ConfigError: a DistributedDataParallel has copied the first process's part into the others; see ``refuse_call_in_ddp``.
        """
        if not self._is_alone:
            refuse_call_in_ddp(self._first)
        tracing = dataclasses.replace(self._first.tracing, modes=modes, autocast=self._autocast())
        fits = self._fits_signature(args, kwargs)
        lackings = (False,) if self._is_alone and fits else (False, True)
        form = next(filter(None, (self._taking(tracing, args, kwargs, with_lacking=each) for each in lackings)), None)
        if form is not None:
            return form
        near = self._near(tracing, args, kwargs)
        if not fits or (near is not None and not near.calls.may_be_traced(args, kwargs)):
            return near or self._form(tracing)  # they name what differs
        try:
            return self._traced(dataclasses.replace(tracing, args=_shapes(args), kwargs=_shapes(dict(kwargs))))
        except TraceError as error:
            if near is not None:
                return near
            raise ConfigError(
                f"the call passes other arguments than the example, and with these {error.problem}",
                place=error.place,
                remedy="pass the arguments of the example; or call the model itself with these, to see whether it takes them",
            ) from error

    def agree_on(self, form: Form) -> None:
        """Raise ConfigError on every rank if others run another form, of other arguments or in another autocast."""
        tracing = form.session.tracing
        if not self._is_of_example(form) or tracing.autocast != self._first.tracing.autocast:
            names = ", ".join(_text_of(leaf) for leaf in form.session.graph.inputs)
            dtype = "no autocast" if tracing.autocast is None else f"autocast {tracing.autocast.dtype}"
            self._first.runtime.agree("the arguments", f"{names}, in {dtype}", in_step=True)

    def has_traced(self, modes: _Modes) -> bool:
        """Return whether the model was traced in these modes for a call as in the example."""
        return self._find(dataclasses.replace(self._first.tracing, modes=modes)) is not None

    def copy_into(self, other: Forms) -> None:
        """Give a copy of the model, with tensors of its own, the same forms."""
        for forms in self._forms.values():
            for form in forms:
                if form is not self.first:
                    other._add(Form.of(copied_form(other._first, form.session)))

    def _taking(self, tracing: Tracing, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, with_lacking: bool) -> Form | None:
        """Return a form that takes a call, among those that were traced and that of the example; see ``Calls.takes``."""
        known = self._forms.get(self._key(tracing), ())
        form = next((form for form in known if form.calls.takes(args, kwargs, with_lacking=with_lacking)), None)
        if form is None and self.first.calls.takes(args, kwargs, with_lacking=with_lacking):
            return self._form(tracing)
        return form

    def _near(self, tracing: Tracing, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Form | None:
        """Return a form of the arguments of a call but for values that are no tensors, or dtypes: it refuses the call, and names them."""
        known = (*self._forms.get(self._key(tracing), ()), self.first)
        return next((form for form in known if form.calls.takes(args, kwargs, with_lacking=not self._is_alone, exactly=False)), None)

    def _autocast(self) -> Autocast | None:
        """Return the autocast around the call, else that in which the model was partitioned."""
        own, runtime = self._first.tracing.autocast, self._first.runtime
        if not torch.is_autocast_enabled(self._device_type):
            return own
        dtype = torch.get_autocast_dtype(self._device_type)
        if own is not None and own.dtype == dtype:
            return own
        if dtype == torch.float16:
            check_scaler("16-mixed", self._first.plan.grid, None if self._is_alone else runtime.n_ranks)
        return Autocast("cpu", dtype, planned_for=self._device_type) if self._is_meta else Autocast(self._device_type, dtype)

    def _form(self, tracing: Tracing) -> Form:
        """Return the form for a call as in the example."""
        return self._find(tracing) or self._traced(tracing)

    def _find(self, tracing: Tracing) -> Form | None:
        """Return the form that was traced with the arguments of ``tracing``."""
        forms = self._forms.get(self._key(tracing), ())
        return next(
            (each for each in forms if each.session.tracing.args is tracing.args and each.session.tracing.kwargs is tracing.kwargs), None
        )

    def _traced(self, tracing: Tracing) -> Form:
        return self._add(Form.of(session_of_tracing(self._first, tracing)))

    def _add(self, form: Form) -> Form:
        """Keep a form, and of those in the same modes the last ones; that of the example stays."""
        forms = self._forms.setdefault(self._key(form.session.tracing), [])
        forms.append(form)
        if len(forms) == _FORMS_ANNOUNCED:
            warnings.warn(
                f"the model was traced for {len(forms)} kinds of calls, which differ in their arguments, in the values of those that are "
                f"no tensors, or in dtypes; each takes as long as the first, and the last {_FORMS_KEPT} are kept\n"
                "  remedy: pass what changes from call to call as a tensor",
                PartitionWarning,
                stacklevel=level_of_caller(),
            )
        if len(forms) > _FORMS_KEPT:
            forms.remove(next(each for each in forms if not self._is_of_example(each)))
        return form

    def _is_of_example(self, form: Form) -> bool:
        """Return whether a form is for the arguments of the example."""
        first, tracing = self._first.tracing, form.session.tracing
        return tracing.args is first.args and tracing.kwargs is first.kwargs

    def _fits_signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the model could be called so; None fits where it is the default, or in ``**kwargs``.

        A call without arguments is that of a rank whose stages read none.
        """
        try:
            bound = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return False
        parameters = self._signature.parameters
        return bool(args or kwargs) and all(value is not None or parameters[name].default is None for name, value in bound.items())

    @staticmethod
    def _key(tracing: Tracing) -> tuple[_Modes, Autocast | None]:
        return tracing.modes, tracing.autocast


def _text_of(leaf: Input) -> str:
    """Return an argument as ranks compare it: a tensor's name and dtype, the value of another one if it is plain."""
    if leaf.dtype is not None:
        return f"{leaf.name} of {leaf.dtype}"
    return f"{leaf.name}={described(leaf.constant)}" if isinstance(leaf.constant, bool | int | float | str | None) else leaf.name


def _shapes(values: Any) -> Any:
    """Return nested values with zeros in place of tensors: a trace reads their sizes and types, and is kept for long."""
    return pytree.tree_map_only(Tensor, lambda leaf: torch.zeros_like(leaf, requires_grad=leaf.requires_grad), values)


def at_sizes(form: Form, inputs: BoundInputs) -> Form:
    """Return the form for inputs of these sizes; raise ConfigError if the model does not take them."""
    of_sizes = form.at(inputs.sizes)
    if of_sizes is not form:
        check_shapes(of_sizes.session.graph, inputs.tensors)
    return of_sizes
