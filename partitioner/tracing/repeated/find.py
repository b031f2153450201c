"""Find the modules of a model that are copies of each other: of one form (``forms.py``), with equal calls (``call_log.py``).

Attributes in which modules of a form differ are left out of the comparison while they are not read (``unread_attributes.py``). Candidates
of one form with equal logs are copies, and are traced once.

Then the model runs a second time, with stand-ins in place of all copies but one. If the rest of the model makes the same calls again, no
copy has a side effect that the rest reads. Copies do the same at other sizes, too: their code and attributes are equal, and a read of
anything else but arguments shows in the logs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from partitioner.tracing.repeated.call_log import Call, CallLogger, StandIn, run_logged
from partitioner.tracing.repeated.forms import LEAST_COPIES, Forms, alike_modules, differing_attributes
from partitioner.tracing.repeated.unread_attributes import Attribute, record_reads

TRACED_ONE_BY_ONE = "modules that repeat are traced one by one, which takes longer"
"""Beginning of a note: no template is traced in place of its copies."""

TRACED_TO_COMPARE = "calls of the model are compared by tracing it again, which takes longer"
"""Beginning of a note: a run on the meta device does not show what the model computes."""


@dataclass(frozen=True)
class Copies:
    """Modules that compute the same, each with its own weights.

    Attributes:
        template: path of the module that is traced.
        others: paths of the modules whose graph is copied from the template's.
        stand_in: gives a result like that of each of them.
        unread: attributes in which they may differ, since they were not read.
    """

    template: str
    others: tuple[str, ...]
    stand_in: StandIn
    unread: frozenset[Attribute]


def calls_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], notes: list[str]) -> Hashable | None:
    """Return all PyTorch calls of a model on the meta device, equal for equal calls in the same order; None if they cannot be compared.

    The model keeps what it changes in its attributes.

    Args:
        notes: gets the reason why they cannot be compared.
    """
    try:
        log = run_logged(model, args, kwargs, CallLogger({}, stand_ins={}), restored=False).outer
    except Exception as error:  # noqa: BLE001  a model that reads values, or cannot run on the meta device
        notes.append(f"{TRACED_TO_COMPARE}: {words_of(error)}")
        return None
    if log.unseen:
        notes.append(f"{TRACED_TO_COMPARE}: PyTorch makes tensors in calls that are not seen")
        return None
    return tuple(log.entries)


def find_copies(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], notes: list[str], unread: frozenset[Attribute] | None = None
) -> tuple[Copies, ...]:
    """Return the modules of a model that compute the same; none unless a second run, with stand-ins, confirms all of them.

    Args:
        notes: gets the reason why copies are not looked for, or are not used.
        unread: attributes in which copies may differ; those that are read are compared after all. None: all in which modules differ.
    """
    unread = frozenset(differing_attributes(model)) if unread is None else unread
    forms = Forms(unread)
    modules = alike_modules(model, forms)
    if len(modules) < LEAST_COPIES or any("forward" in vars(module) for module in modules.values()):
        return ()
    try:
        with record_reads(unread) as read:
            first = run_logged(model, args, kwargs, CallLogger(modules, stand_ins={}))
        if read:
            unread, forms = unread - read, Forms(unread - read)
            if not alike_modules(model, forms).keys() <= modules.keys():  # others, inside some of these
                return find_copies(model, args, kwargs, notes, unread)
        copies = _copies(first, forms, unread)
        if not copies:
            return ()
        stand_ins = {path: group.stand_in for group in copies for path in group.others}
        second = run_logged(model, args, kwargs, CallLogger(modules, stand_ins))
    except Exception as error:  # noqa: BLE001  a model that reads values, or cannot run on the meta device, is traced whole
        notes.append(f"{TRACED_ONE_BY_ONE}: {words_of(error)}")
        return ()
    expected = [(call.path, call.log) for call in first.calls if call.path not in stand_ins]
    is_same = second.outer.entries == first.outer.entries and expected == [(call.path, call.log) for call in second.calls]
    if is_same and not second.outer.reads_unknown:
        return copies
    notes.append(f"{TRACED_ONE_BY_ONE}: the rest of the model calls something else where {copies[0].others[0]} does not run")
    return ()


def words_of(error: Exception) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _copies(run: CallLogger, forms: Forms, unread: frozenset[Attribute]) -> tuple[Copies, ...]:
    """Group the modules that are called once by their forms and the keys of their calls; return groups of ``LEAST_COPIES`` or more."""
    n_calls = Counter(call.path for call in run.calls)
    alike: defaultdict[Hashable, list[Call]] = defaultdict(list)
    for call in run.calls:
        if call.key is not None and n_calls[call.path] == 1:
            alike[forms.number(run.modules[call.path]), call.key].append(call)
    copies = []
    for template, *others in alike.values():
        if len(others) + 1 >= LEAST_COPIES and template.stand_in is not None:
            copies.append(Copies(template.path, tuple(other.path for other in others), template.stand_in, unread))
    return tuple(copies)
