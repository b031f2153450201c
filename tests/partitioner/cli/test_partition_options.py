"""The options of the command line are those of ``partition``."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from partitioner import Constraints, partition
from partitioner.cli import main, partition_commands
from partitioner.cli.parser import command_parser, option_flags
from partitioner.cli.partition_options import NOT_IN_TEXT, constraint_keywords, flags_of, given_constraints, given_options, keywords
from passes.ir.errors import ConfigError

COMMANDS = ("plan", "inspect", "simulate", "check")

NET = """
import torch
from torch import nn

def factory(depth=2):
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth))), (torch.zeros(8, 8),)
"""


def parsed(line: str, command: str = "plan") -> argparse.Namespace:
    return command_parser().parse_args([command, "net.py:factory", *shlex.split(line)])


def read(line: str) -> dict[str, Any]:
    arguments = parsed(line)
    constraints = given_constraints(arguments)
    return given_options(arguments) | ({"constraints": Constraints(**constraints)} if constraints else {})


# -- against the signature -------------------------------------------------------------------------------------------------------------


def test_keywords_are_the_parameters_of_partition() -> None:
    parameters = inspect.signature(partition).parameters
    assert {each.name: each.default for each in keywords() if each.name != "model"} == {
        name: parameter.default for name, parameter in parameters.items() if name != "model"
    }
    assert [(each.name, each.annotation) for each in keywords()] == [(name, str(each.annotation)) for name, each in parameters.items()]
    assert [each.name for each in constraint_keywords()] == [field.name for field in dataclasses.fields(Constraints)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_keyword_of_partition_is_an_option(command: str) -> None:
    assert set(NOT_IN_TEXT) < set(inspect.signature(partition).parameters), "a reason names a keyword that partition does not have"
    arguments = vars(parsed("", command))
    flags = option_flags(arguments["help_text"]())
    for name in [*inspect.signature(partition).parameters, *(field.name for field in dataclasses.fields(Constraints))]:
        if name not in (*NOT_IN_TEXT, "constraints"):
            assert name in arguments
            assert arguments[name] is None, "an option that is left out leaves the default to partition"
            assert flags_of(name)[0] in flags


def test_every_option_has_a_help_of_the_docstring() -> None:
    assert all(each.text for each in (*keywords(), *constraint_keywords()))
    text = parsed("").help_text()
    assert "layers.*=full,layers.*.attention=selective" in text
    assert "``" not in text


# -- values ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--devices 4", {"devices": 4}),
        ("--devices cuda:0,cuda:1", {"devices": ["cuda:0", "cuda:1"]}),
        ("--mode data=2,tile=2x2", {"mode": {"data": 2, "tile": (2, 2)}}),
        ("""--mode '{"data":2,"tile":[2,2]}'""", {"mode": {"data": 2, "tile": (2, 2)}}),
        ("--precision bf16-mixed --optimizer sgd --batchnorm local", {"precision": "bf16-mixed", "optimizer": "sgd", "batchnorm": "local"}),
        ("--stages-per-device 2 --n-microbatches 4", {"stages_per_device": 2, "n_microbatches": 4}),
        ("--microbatches 4", {"n_microbatches": 4}),
        ("--recompute full", {"recompute": "full"}),
        ("--recompute '0.*=full,1=none'", {"recompute": {"0.*": "full", "1": "none"}}),
        ("--recompute '0.*=full' --recompute 1=none", {"recompute": {"0.*": "full", "1": "none"}}),
        ("--memory-limit 16GiB", {"memory_limit": "16GiB"}),
        ("--memory-limit 17179869184", {"memory_limit": 17179869184}),
        ("--training", {"training": True}),
        ("--eval", {"training": False}),
        ("--progress", {"progress": True}),
        ("--no-progress", {"progress": False}),
        ("--reduce-dtype bfloat16 --inputs local", {"reduce_dtype": "bfloat16", "inputs": "local"}),
        ("--batch-dims \"x=1,batch['pos']=none\"", {"batch_dims": {"x": 1, "batch['pos']": None}}),
        ("--axes sequence=tensor,ffn[3]=tensor", {"constraints": Constraints(axes={"sequence": "tensor", "ffn[3]": "tensor"})}),
        ("--device-map 0=0,1=cuda:1,=0", {"constraints": Constraints(device_map={"0": 0, "1": "cuda:1", "": 0})}),
        ("--pin 1=1 --split-spec 1=beginning", {"constraints": Constraints(pin={"1": 1}, split_spec={"1": "beginning"})}),
        ("--halo exchange", {"constraints": Constraints(halo="exchange")}),
        ("--halo stem=overlap", {"constraints": Constraints(halo={"stem": "overlap"})}),
        ("--attention ring --tp-plan '*.up=colwise'", {"constraints": Constraints(attention="ring", tp_plan={"*.up": "colwise"})}),
    ],
)
def test_values(line: str, expected: dict[str, Any]) -> None:
    assert read(line) == expected


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--axes heads", "--axes heads has 'heads', which gives no value to a name"),
        ("--axes heads=tensor,", "has '', which gives no value"),
        ("--recompute full,0.*=none", "has 'full', which gives no value"),
        ("--recompute 0=full,0=none", "names '0' twice"),
        ("--recompute 0=full --recompute selective", "has 'selective', which"),
    ],
)
def test_mappings_that_cannot_be_read(line: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(line)
    assert problem in str(caught.value)
    assert "NAME=VALUE" in str(caught.value)


# -- commands --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the keywords of each call of ``partition`` by a command, which then ends."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    calls: list[dict[str, Any]] = []

    def refuse(model: Any, **options: Any) -> None:
        calls.append({"model": model, **options})
        raise ConfigError("seen")

    monkeypatch.setattr(partition_commands, "partition", refuse)
    return calls


def run(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(line)) == 2
    return capsys.readouterr().err


def test_factories_get_arguments(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    run("plan 'net.py:factory(depth=5)' --devices 1 --precision bf16-mixed", capsys)
    assert len(asked[0]["model"]) == 5
    assert asked[0]["precision"] == "bf16-mixed"
    assert "its arguments are depth" in run("plan net.py:factory --batch 4", capsys)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("--precison bf16-mixed", "has no option --precison\n  remedy: did you mean --precision?"),
        ("--optimiser=sgd", "has no option --optimiser\n  remedy: did you mean --optimizer?"),
        ("--axis heads=tensor", "has no option --axis\n  remedy: did you mean --axes?"),
        ("--zzz", "has no option --zzz\n  remedy: partitioner plan --help lists"),
        ("again.py:factory", "has no argument again.py:factory"),
    ],
)
def test_an_unknown_option_is_refused_with_a_suggestion(
    option: str, remedy: str, asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert remedy in run(f"plan net.py:factory --devices 2 {option}", capsys)
    assert not asked


def test_values_are_checked_by_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for line, problem in {
        "--precision bf16": "precision",
        "--optimizer adamm": "adamm",
        "--batchnorm locl": "did you mean 'local'",
        "--pin 0=first": "pin",
        "--recompute 0.*=ful": "did you mean 'full'",
    }.items():
        complaint = run(f"plan net.py:factory --devices 2 {line}", capsys)
        assert problem in complaint
        assert "remedy: " in complaint


@pytest.mark.slow
def test_plans_follow_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = "--cluster h100:1x2 --mode pipeline --precision bf16-mixed --recompute '*=full' --split-spec 2=beginning --n-microbatches 2"
    assert main(shlex.split(f"check 'net.py:factory(depth=3)' {options}")) == 0
    assert main(shlex.split(f"plan 'net.py:factory(depth=3)' {options} --json plan.json")) == 0
    capsys.readouterr()
    assert main(shlex.split("simulate 'net.py:factory(depth=3)' --precision bf16-mixed --plan plan.json --json")) == 0


def test_source_is_read_as_it_is_imported() -> None:
    """The keywords are read from the file that Python imports."""
    tree = ast.parse(Path(inspect.getsourcefile(inspect.unwrap(partition)) or "").read_text())
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "partition")
    assert len(keywords()) == len(function.args.args) + len(function.args.kwonlyargs)
