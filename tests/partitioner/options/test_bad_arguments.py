"""Arguments of a wrong type or value, for every parameter of every public call: a PartitionError that names it, before any work is done."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cost_models.hardware.devices import Level
from cost_models.profiling.op_times import MeasuredCosts
from partitioner import (
    Cluster,
    ConfigError,
    Constraints,
    Device,
    Link,
    PartitionedModel,
    PartitionError,
    Plan,
    Schedule,
    draw,
    draw_weight,
    partition,
)
from partitioner.api import partition as implemented
from partitioner.experiments import sweep
from partitioner.options.arguments import EXAMPLES, VALUES
from partitioner.schedules.catalog import make_schedule
from passes.ir.arguments.conform import conform
from passes.ir.arguments.describe import described, expected

X = torch.randn(8, 4)
DEVICE = Device("d", {"float32": 1e12}, 2**30, 1e11)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def made(**arguments: Any) -> PartitionedModel:
    return partition(**{"model": mlp(), "devices": 2, "mode": "pipeline", "example_inputs": (X,), **arguments})


@pytest.fixture(scope="module")
def pm() -> PartitionedModel:
    return made(n_microbatches=2)


class Unlike:
    """An object of no known type."""


WRONG: dict[str, Any] = {
    "an object": Unlike(),
    "a class": nn.Linear,
    "None": None,
    "a bool": True,
    "zero": 0,
    "a negative number": -1,
    "a huge number": 10**30,
    "a number too long to print": 10**5000,
    "a float": 2.5,
    "a whole float": 2.0,
    "nan": math.nan,
    "infinity": math.inf,
    "a complex number": 1j,
    "text": "bogus",
    "digits": "2",
    "no text": "",
    "bytes": b"2",
    "an empty list": [],
    "a nested list": [[None]],
    "an empty tuple": (),
    "an empty dict": {},
    "a dict of numbers": {1: 2},
    "a dict of text": {"bogus": "bogus"},
    "a set": {1},
    "a tensor": torch.ones(2),
    "an array": np.ones(2),
    "a function": lambda: None,
    "a generator": iter([]),
}


def calls(pm: PartitionedModel, folder: Path) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Yield every public call that takes plain arguments, with arguments that are right."""
    cluster = Cluster([DEVICE] * 4, [Level(2, Link(1e-6, 1e10)), Level(4, Link(1e-5, 1e9))])
    yield "Device", Device, {"name": "d", "peak_flops": {"float32": 1e12}, "memory_bytes": 2**30, "memory_bandwidth": 1e11}
    yield "Link", Link, {"latency": 1e-6, "bandwidth": 1e9}
    yield "Level", Level, {"size": 2, "link": Link(1e-6, 1e9)}
    yield "Cluster", Cluster, {"devices": [DEVICE, DEVICE], "links": Link(1e-6, 1e9)}
    yield "Cluster.preset", Cluster.preset, {"name": "h100"}
    yield "Cluster.parse", Cluster.parse, {"text": "h100:2"}
    yield "Cluster.from_toml", Cluster.from_toml, {"path": folder / "none.toml"}
    yield "Cluster.first", cluster.first, {"n_devices": 2}
    yield "Cluster.placed", cluster.placed, {"order": [1, 0, 2, 3]}
    yield "Constraints", Constraints, {}
    yield "MeasuredCosts", MeasuredCosts, {}
    yield "Plan.from_json", Plan.from_json, {"text": pm.plan.to_json()}
    yield "graph", pm.graph, {"rank": 0}
    yield "train", pm.train, {}
    yield "simulate", pm.simulate, {}
    yield "simulate_inference", pm.simulate_inference, {"batches": (2,)}
    yield "explain", pm.explain, {}
    yield "save_report", pm.save_report, {"path": folder / "report.html"}
    for name in ("verify", "cost_formula", "record", "full_state_dict", "full_gradients", "no_sync", "sharded_state_dict"):
        yield name, functools.partial(call_with_extra, getattr(pm, name)), {"extra": None}
    optimizer = torch.optim.SGD(pm.parameters())
    yield "named_parts", pm.named_parts, {"rank": 0}
    yield "full_optimizer_state_dict", pm.full_optimizer_state_dict, {"optimizer": optimizer}
    yield "sharded_optimizer_state_dict", pm.sharded_optimizer_state_dict, {"optimizer": optimizer}
    state = pm.full_optimizer_state_dict(optimizer)
    yield "load_optimizer_state_dict", pm.load_optimizer_state_dict, {"optimizer": optimizer, "state_dict": state}
    yield "clip_grad_norm_", pm.clip_grad_norm_, {"max_norm": 1.0}
    yield "load_state_dict", pm.load_state_dict, {"state_dict": pm.full_state_dict()}
    yield "initialize", pm.initialize, {}
    yield "draw", draw, {"pm": pm}
    yield "draw_weight", draw_weight, {"pm": pm, "name": "0.weight"}
    yield "Drawing.save", draw(pm).save, {"path": folder / "drawing.svg"}
    yield "Timeline.save", pm.simulate().timeline.save, {"path": folder / "timeline.json"}


def call_with_extra(call: Callable[..., Any], extra: Any) -> Any:
    """Call a method that takes no argument with one."""
    return call(extra)


@pytest.mark.slow
def test_every_parameter_refuses_what_it_cannot_take(pm: PartitionedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right or refused: a call returns, or raises a PartitionError."""
    monkeypatch.chdir(tmp_path)  # some names of files are right
    tried, raw = 0, []
    for name, call, arguments in calls(pm, tmp_path):
        parameters = [each for each in inspect.signature(call).parameters if each not in ("self", "others")]
        for parameter, (kind, value) in itertools.product(parameters, WRONG.items()):
            tried += 1
            try:
                call(**{**arguments, parameter: value})
            except PartitionError:
                continue
            except Exception as error:  # noqa: BLE001  what the test looks for
                raw.append(f"{name}({parameter}={kind}): {type(error).__name__}: {error}"[:200])
    assert not raw, "\n".join(raw)
    assert tried > 500


def test_every_parameter_of_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of ``partition``; a value of a type that the signature does not name is refused before the model is traced."""
    parameters = inspect.signature(partition).parameters
    hints = typing.get_type_hints(implemented)
    monkeypatch.setattr("partitioner.api.trace_model", stop)
    raw = []
    for parameter, (kind, value) in itertools.product(parameters, WRONG.items()):
        try:
            made(**{parameter: value})
        except TracedError:
            if not fits(value, hints[parameter]):
                raw.append(f"{parameter}={kind} was traced")
        except PartitionError as error:
            if parameter not in str(error) and not fits(value, hints[parameter]):
                raw.append(f"{parameter}={kind} is not named: {error}")
        except Exception as error:  # noqa: BLE001  what the test looks for
            raw.append(f"{parameter}={kind}: {type(error).__name__}: {error}"[:200])
    assert not raw, "\n".join(raw)


class TracedError(Exception):
    """All arguments were taken."""


def stop(*args: Any, **kwargs: Any) -> None:
    raise TracedError


def fits(value: Any, annotation: Any) -> bool:
    try:
        conform(value, annotation, "value")
    except ConfigError:
        return False
    return True


class Slow:
    """A cost model of a user's own."""

    def __init__(self, seconds: Any) -> None:
        self.seconds = seconds

    def operation_time(self, work: Any, device: Any, dtype: Any) -> Any:
        return self.seconds() if callable(self.seconds) else self.seconds

    def transfer_time(self, size: Any, link: Any) -> float:
        return 1e-6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": 3}, ("model must be a torch.nn.Module, not 3 (int)",)),
        ({"model": nn.Linear}, ("the class Linear", "model=Linear(...)")),
        ({"devices": 2.0}, ("devices must be an int", "not 2.0 (float)", "devices=2")),
        ({"devices": True}, ("devices must be an int", "not True")),
        ({"devices": "cuda:99"}, ("devices=['cuda:99']",)),
        ({"devices": ["cpu", 1]}, ("devices[1] must be a str or a torch.device",)),
        ({"devices": 10**9}, ("devices=1000000000", "at most")),
        ({"devices": ["mps", "mps"]}, ("mps",)),
        ({"mode": None}, ("mode must be a str or a mapping", 'mode="pipeline"')),
        ({"mode": {}}, ("mode={}", "no dimension")),
        ({"mode": {"data": 0}}, ("'data' has size 0",)),
        ({"mode": {"data": 1.5}}, ("mode['data'] must be an int", "1.5 (float)")),
        ({"mode": {1: 2}}, ("the key 1 of mode must be a str",)),
        ({"mode": {"data": True, "tensor": 2}}, ("mode['data'] must be an int",)),
        ({"mode": {"tile": (2, 1.0)}}, ("mode['tile'][1] must be an int",)),
        ({"mode": {"elephant": 2}}, ("elephant", "pipeline")),
        ({"example_inputs": [X]}, ("example_inputs must be a tuple", "example_inputs=(x,)")),
        ({"example_kwargs": [1]}, ("example_kwargs must be a mapping",)),
        ({"example_kwargs": {1: X}}, ("the key 1 of example_kwargs",)),
        ({"training": "yes"}, ("training must be a bool or None", "'yes' (str)")),
        ({"n_microbatches": "2"}, ("n_microbatches must be an int or None", "n_microbatches=2")),
        ({"n_microbatches": 0}, ("n_microbatches must be 1 or more",)),
        ({"n_microbatches": 10**9}, ("forwards", "262144 at most")),
        ({"devices": 4, "mode": {"fsdp": 2, "zero1": 2}}, ("in 2 ways: fsdp, zero1", "keep one of them")),
        (
            {"example_inputs": X.expand(10**6, 8, 4)[:, 0], "n_microbatches": 10**6, "schedule": "1F1B"},
            ("2000000 forwards", "262144 at most"),
        ),
        ({"stages_per_device": 10**6}, ("2000000 stages", "can be cut into 3")),
        ({"stages_per_device": 10**12, "schedule": "Interleaved1F1B"}, ("2000000000000 forwards",)),
        ({"stages_per_device": 10**12}, ("2000000000000 stages",)),
        ({"devices": 10**4}, ("10000 stages", "can be cut into 3")),
        ({"example_inputs": X.to_sparse()}, ("input is sparse (torch.sparse_coo)", "x.to_dense()")),
        ({"example_inputs": torch.nested.nested_tensor([X, X])}, ("input is nested",)),
        ({"schedule": 1}, ("schedule must be a str, a Schedule or None", '"1F1B"')),
        ({"schedule": make_schedule("1F1B", 2, 2)}, ("cannot be registered as '1F1B'", "another name")),
        ({"stages_per_device": -1}, ("stages_per_device must be 1 or more",)),
        ({"recompute": True}, ("recompute must be a str, ", '"selective"')),
        ({"recompute": "sometimes"}, ("recompute='sometimes'", '"selective"')),
        ({"cluster": 8}, ("cluster must be a Cluster, a str or None", "h100:8x8")),
        ({"memory_limit": math.nan}, ("memory_limit must be an int, a str or None, not nan",)),
        ({"memory_limit": -5}, ("memory_limit", "positive")),
        ({"memory_limit": "9" * 400 + "GiB"}, ("memory_limit", "is not a size")),
        ({"optimizer": None}, ("optimizer must be a str", '"adamw"')),
        ({"optimizer": "foo"}, ("optimizer 'foo'",)),
        ({"precision": "fp8"}, ("precision='fp8'", "bf16-mixed")),
        ({"batchnorm": None}, ("batchnorm must be a str", '"local"')),
        ({"inputs": "both"}, ("inputs='both'", '"global"')),
        ({"constraints": {}}, ("constraints must be a Constraints or None", "Constraints(")),
        ({"plan": "x"}, ("plan must be a Plan or None", "Plan.from_json")),
        ({"cost_model": 3}, ("cost_model must be a CostModel", "operation_time and transfer_time")),
        ({"cost_model": MeasuredCosts}, ("the class MeasuredCosts", "MeasuredCosts(...)")),
        ({"cost_model": Slow(math.nan)}, ("Slow.operation_time()", "nan")),
        ({"cost_model": Slow("long")}, ("Slow.operation_time()", "'long' (str)")),
        ({"cost_model": Slow(-1.0)}, ("Slow.operation_time() returned -1.0",)),
        ({"cost_model": Slow(lambda: 1 / 0)}, ("Slow.operation_time() failed: ZeroDivisionError",)),
        ({"progress": "yes"}, ("progress must be a bool or None",)),
        ({"n_microbatch": 4}, ("n_microbatch", "did you mean n_microbatches?")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_messages(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.remedy
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device_map": "auto"}, ("Constraints: device_map must be a mapping", "'auto' (str)", "leave it out")),
        ({"device_map": {"0": 1.0}}, ("device_map['0'] must be an int, a str or a torch.device",)),
        ({"axes": ["heads"]}, ("axes must be a mapping of str to str",)),
        ({"axes": {"heads": 2}}, ("axes['heads'] must be a str",)),
        ({"pin": {"0": "1"}}, ("pin['0'] must be an int", "=1")),
        ({"halo": "never"}, ("halo must be", "'never'")),
        ({"split_spec": "auto"}, ("split_spec must be a mapping",)),
        ({"tp_plan": {"*": None}}, ("tp_plan['*'] must be a str",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_constraints(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Constraints(**fields)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_errors_name_the_public_class(pm: PartitionedModel) -> None:
    calls: tuple[Callable[..., object], ...] = (pm.simulate, pm.clip_grad_norm_, pm.load_safetensors, pm.load_state_dict)
    for call in calls:
        with pytest.raises(ConfigError, match=rf"^PartitionedModel\.{call.__name__}\(\): "):
            call(Unlike())


@pytest.mark.parametrize(
    ("kind", "args", "kwargs", "words"),
    [
        (Constraints, (), {"axis": {"heads": "tensor"}}, ("'axis'", "did you mean axes? its arguments are device_map")),
        (Device, (), {"memory": 1}, ("unexpected keyword argument 'memory'", "did you mean memory_bytes?")),
        (Link, (), {}, ("missing a required argument: 'latency'", "its arguments are latency, bandwidth")),
        (Cluster, ([DEVICE],), {}, ("'links'", "its arguments are devices, links, places")),
        (Cluster, ([DEVICE], Link(0.0, 1e9)), {"nodes": 1}, ("'nodes'",)),
        (Level, (2, Link(0.0, 1e9), True, 3), {}, ("too many positional arguments",)),
        (Schedule, (), {"text": "0F0"}, ("'text'", "its arguments are name, n_microbatches")),
    ],
)
def test_unknown_names(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}\(\): ") as caught:
        kind(*args, **kwargs)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"models": 3}, ("models must be",)),
        ({"devices": "2"}, ("devices must be an int", "devices=2")),
        ({"devices": [2, 0]}, ("devices[1] must be 1 or more",)),
        ({"devices": 10**9}, ("at most",)),
        ({"modes": None}, ("modes must be",)),
        ({"clusters": 3}, ("clusters must be",)),
        ({"clusters": ["nothing:2"]}, ("nothing",)),
        ({"schedules": ["1F1C"]}, ("schedules[0]", "1F1C", "1F1B")),
        ({"microbatches": [0]}, ("microbatches[0] must be 1 or more",)),
        ({"recompute": "sometimes"}, ("recompute='sometimes'",)),
        ({"store": 3}, ("store must be",)),
        ({"n_samples": 0}, ("n_samples must be 1 or more",)),
        ({"workers": -1}, ("workers must be 0 or more",)),
        ({"timeout": math.nan}, ("timeout is not a number",)),
        ({"timeout": 0}, ("timeout must be more than 0",)),
        ({"memory_limit": "lots"}, ("lots",)),
        ({"optimizer": "foo"}, ("foo",)),
        ({"resume": "no"}, ("resume must be a bool",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sweeps(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep(**{"models": {"net": lambda: (mlp(), (X,))}, "devices": 2, "modes": "data", "workers": 0, **arguments})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_numbers_of_other_libraries_are_numbers() -> None:
    numbers: dict[str, Any] = {
        "devices": np.int64(2),
        "mode": {"data": np.int32(2)},
        "training": np.bool_(True),
        "memory_limit": np.int64(2**30),
    }
    found = partition(mlp(), example_inputs=X, **numbers)
    assert found.plan.mesh == (("data", 2),)
    assert type(found.plan.mesh[0][1]) is int
    assert torch.equal(found(X), found(X))
    assert Plan.from_json(found.plan.to_json()) == found.plan


def test_one_tensor_is_the_only_input() -> None:
    found = made(example_inputs=X)
    assert found.plan == made().plan


def test_the_tables_name_parameters() -> None:
    parameters = set(inspect.signature(partition).parameters)
    assert set(VALUES) <= parameters
    assert set(EXAMPLES) == parameters


class Answers(typing.Protocol):
    def answer(self) -> int: ...


@pytest.mark.parametrize(
    ("value", "annotation", "found"),
    [
        (np.int64(3), int, 3),
        (np.float32(0.5), float, 0.5),
        (3, float, 3),
        (np.bool_(True), bool, True),
        (torch.Size([2, 3]), typing.Sequence[int], torch.Size([2, 3])),
        (range(3), typing.Sequence[int], range(3)),
        ([np.int64(1), 2], typing.Sequence[int], [1, 2]),
        ({"a": np.int64(1)}, Mapping[str, int], {"a": 1}),
        (None, int | None, None),
        ("a", typing.Literal["a", "b"], "a"),
        ((1, "a"), tuple[int, str], (1, "a")),
        (math.inf, float, math.inf),
    ],
)
def test_values_that_conform(value: Any, annotation: Any, found: Any) -> None:
    assert conform(value, annotation, "it") == found
    assert type(conform(value, annotation, "it")) is type(found)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, int),
        (1, bool),
        (True, float),
        (math.nan, float),
        (np.nan, float | None),
        ("ab", typing.Sequence[str]),
        (b"ab", typing.Sequence[int]),
        ({1, 2}, typing.Sequence[int]),
        ((1,), tuple[int, str]),
        (1, typing.Literal[True]),
        (Unlike, Unlike),
        (Unlike(), Answers),
        (torch.tensor(2), int),
        (np.array([2]), typing.Sequence[int]),
    ],
)
def test_values_that_do_not(value: Any, annotation: Any) -> None:
    with pytest.raises(ConfigError):
        conform(value, annotation, "it")


def test_words() -> None:
    assert expected(int | str | None) == "an int, a str or None"
    assert expected(Tensor | None) == "a torch.Tensor or None"
    assert described(torch.ones(2, 3)) == "a Tensor of shape (2, 3)"
    assert described([torch.ones(2)]) == "[<Tensor>] (list)"
    assert len(described("x" * 1000)) < 100
