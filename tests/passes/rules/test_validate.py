"""Every rule is executed: real operands are cut along every factor, the parts are run, and what they make is compared with the whole."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

from passes.graph.schemas import packet
from passes.rules.registry import RULES
from passes.rules.tables import ELEMENTWISE
from passes.rules.validate import prove_rule
from tests.support.samples.rule_samples import automatic_samples, samples
from tests.support.samples.rule_samples_values import Sample

SAMPLES = list(samples())


def overloads_of(key: object) -> list[OpOverload]:
    """Return the overloads that a line of the table covers."""
    return [key] if isinstance(key, OpOverload) else [getattr(key, name) for name in key.overloads()]  # type: ignore[attr-defined]


def pointwise() -> list[OpOverload]:
    """Return the overloads tagged as pointwise, without variants that write their results into arguments."""
    found = []
    for name in dir(torch.ops.aten):
        operator = getattr(torch.ops.aten, name)
        for overload in operator.overloads() if hasattr(operator, "overloads") else []:
            target = getattr(operator, overload)
            if torch.Tag.pointwise in target.tags and not any(argument.is_out for argument in target._schema.arguments):
                found.append(target)
    return found


def automatic() -> list[Sample]:
    """Return a call of every elementwise overload, with a line in the table or without, whose arguments follow from its schema."""
    lines = [each for rule, keys in ELEMENTWISE.items() if str(rule).startswith("...") for key in keys for each in overloads_of(key)]
    overloads = dict.fromkeys([*lines, *pointwise()])
    functional = [each for each in overloads if not any(argument.is_out for argument in each._schema.arguments)]
    return [call for each in functional for call in automatic_samples(each)]


AUTOMATIC = automatic()


@pytest.mark.parametrize("call", SAMPLES, ids=repr)
def test_parts_make_the_whole(call: Sample) -> None:
    prove_rule(call.operator, *call.args, **call.kwargs)


@pytest.mark.parametrize("call", AUTOMATIC, ids=repr)
def test_parts_make_the_whole_for_broadcast_operands(call: Sample) -> None:
    prove_rule(call.operator, *call.args, **call.kwargs)


def test_every_operator_of_the_table_has_a_sample() -> None:
    proved = {found for call in (*SAMPLES, *AUTOMATIC) for found in (call.operator, packet(call.operator))}
    assert [str(key) for key in RULES if key not in proved] == []
