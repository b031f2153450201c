"""Print a case as a script that stands alone."""

from __future__ import annotations

import inspect

from tests.fuzz.programs.generator import Case
from tests.fuzz.programs.program import Program, loss_of
from tests.fuzz.programs.structures import leaves_of
from tests.fuzz.running.outcome import Outcome
from tests.fuzz.running.precision import dtype_of
from tests.fuzz.templates.modules import sources_of

IMPORTS = """import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from partitioner import Constraints, partition
"""


def reproduction(case: Case, outcome: Outcome) -> str:
    """Return a script that calls and trains the model and its partitions, with how the case ended first.

    It prints outputs, written arguments, kept tensors, gradients and states of both. For a case over processes it is run by torchrun.
    """
    program, usage, precision = case.program, case.program.usage, case.configuration.precision
    detail = "\n".join(f"# {line}" for line in outcome.detail.strip().splitlines()[-6:])
    text = program.source() + "\n" + "\n".join(each.code + "(" for each in program.inputs)
    options = f", batch_dims={dict(usage.batch_dims)}" if usage.batch_dims else ""
    return f"""# seed {program.seed}: {outcome.kind}: {outcome.reason}
{detail}
{IMPORTS}
torch.set_default_dtype({dtype_of(precision)})
torch.manual_seed({program.seed})


{sources_of(text)}
{program.source()}
{inspect.getsource(leaves_of)}

{inspect.getsource(loss_of)}

{_inputs(program)}

def loss_on(module):
    def loss(output, target):
{_changes(program)}        return loss_of(output, target){"".join(f" + 0.3 * module.{each}" for each in usage.in_loss)}
    return loss


model = Model(){f".to({dtype_of(precision)})" if precision else ""}.train({program.training})
for name, parameter in model.named_parameters():
    parameter.requires_grad_(name not in {list(usage.frozen)})
target = {usage.target.replace("rows", str(program.rows))}
args, kwargs = inputs({usage.starts_switched})
pm = partition(model, example_inputs=args, example_kwargs=kwargs, {case.configuration.text()}{options})
for is_switched in {_calls(program)}:
    for module in (model, pm):
        args, kwargs = inputs(is_switched)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled={precision == "bf16-mixed"} and module is model):
            output = module(*args, **kwargs)
        print("output", output, "inputs", args, kwargs)
{_kept(program)}        loss_on(module)(output, target).backward()
        module.zero_grad()
args, kwargs = inputs({usage.starts_switched})
torch.manual_seed(1)
with torch.autocast("cpu", torch.bfloat16, enabled={precision == "bf16-mixed"}):
    loss = loss_on(model)(model(*args, **kwargs), target)
loss.backward()
args, kwargs = inputs({usage.starts_switched})
torch.manual_seed(1)
pm.train_step(*args, target=target, loss_fn=loss_on(pm), **kwargs)
found = pm.full_gradients()
for name, parameter in model.named_parameters():
    print(name, parameter.grad, found[name])
for name, value in model.state_dict().items():
    print(name, value, pm.full_state_dict()[name])
"""


def _calls(program: Program) -> tuple[bool, ...]:
    first = program.usage.starts_switched
    return (first, not first, first) if program.usage.switch is not None else (first,)


def _kept(program: Program) -> str:
    """Return the lines that print kept tensors."""
    return "".join(f"        print({each!r}, module.{each})\n" for each in program.usage.kept)


def _changes(program: Program) -> str:
    """Return the lines that change the output in place."""
    lines = [line for place, code in program.usage.changes for line in (f"leaf = leaves_of(output)[{place}]", code)]
    return "".join(f"        {line}\n" for line in lines)


def _inputs(program: Program) -> str:
    """Return a function that makes positional and keyword inputs."""
    lines = ["def inputs(is_switched):", "    torch.manual_seed(1)", f"    rows = {program.rows}"]
    lines += [f"    {each.name} = {each.code}" for each in program.inputs]
    passed = ", ".join(each.name for each in program.inputs if not each.keyword)
    lines.append(f"    kwargs = {{{', '.join(f'{each.name!r}: {each.name}' for each in program.inputs if each.keyword)}}}")
    if program.usage.switch is not None:
        lines += ["    if not is_switched:", f"        kwargs.pop({program.usage.switch!r}, None)"]
    lines.append(f"    return ({passed}{',' if passed else ''}), kwargs")
    return "\n".join(lines) + "\n"
