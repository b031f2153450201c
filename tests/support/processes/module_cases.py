"""Functions of worker processes in the tests of a partitioned model as a module: each function runs on every rank at once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from partitioner import ConfigError, Constraints, partition
from tests.support.models.language import causal_model
from tests.support.models.switched import switched


def mode_differences() -> str:
    """Train and validate with one partitioned model, in processes that hold replicas, shards or stages."""
    found = ""
    for mode in ("data", "fsdp", "pipeline"):
        reference, x = switched()
        pm = partition(copy.deepcopy(reference), 2, mode, example_inputs=(x,), progress=False)
        module: nn.Module
        results = []
        for module in (reference, pm):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for step in range(2):
                torch.manual_seed(step)
                optimizer.zero_grad()
                module.train()
                if module is pm:
                    pm.train_step(x, target=x[:, :3], loss_fn=nn.functional.mse_loss)
                else:
                    nn.functional.mse_loss(module(x), x[:, :3]).backward()
                optimizer.step()
            with torch.no_grad():
                results.append(module.eval()(x))
        state = pm.full_state_dict()
        same = torch.allclose(*results) and all(torch.allclose(state[name], each) for name, each in reference.state_dict().items())
        found += "" if same else f"{mode} differs; "
    return found


def frozen_counts() -> list[str]:
    """Return the models whose ``parameters()`` and ``named_parameters()`` differ, or that train, after freezing."""
    wrong = []
    for mode in ("tensor", "pipeline"):
        model, x = switched()
        pm = partition(model, 2, mode, example_inputs=(x,), progress=False)
        copied = copy.deepcopy(pm).requires_grad_(requires_grad=False)
        pickled = pickle.loads(pickle.dumps(copied))  # noqa: S301
        models = {"model": pm, "frozen copy": copied, "copy of frozen": copy.deepcopy(copied), "pickle of frozen": pickled}
        for name, each in models.items():
            parameters = list(each.parameters())
            same = [id(parameter) for parameter in parameters] == [id(parameter) for _, parameter in each.named_parameters()]
            trains = any(parameter.requires_grad for parameter in parameters)
            names = list(each.state_dict()) == list(model.state_dict())
            wrong += [] if same and names and trains == (each is pm) else [f"{mode}, {name}"]
    return wrong


def copy_differences() -> str:
    """Return differences of copies, pickles and averages, in processes that hold replicas, shards or stages."""
    found = ""
    for mode in ("data", "fsdp", "pipeline"):
        model, x = switched()
        pm = partition(copy.deepcopy(model), 2, mode, example_inputs=(x,), progress=False)
        average = AveragedModel(pm, use_buffers=True)
        expected = AveragedModel(model, use_buffers=True)
        for step in range(2):
            torch.manual_seed(step)
            nn.functional.mse_loss(model(x), x[:, :3]).backward()
            torch.manual_seed(step)
            pm.train_step(x, target=x[:, :3], loss_fn=nn.functional.mse_loss)
            for module, mean in ((model, expected), (pm, average)):
                torch.optim.SGD(module.parameters(), 0.1).step()
                mean.update_parameters(module)
        with torch.no_grad():
            restored = pickle.loads(pickle.dumps(average.module))  # noqa: S301
            results = [module.eval()(x) for module in (expected, average, copy.deepcopy(average.module), restored)]
        found += "" if all(torch.allclose(each, results[0]) for each in results) else f"{mode} differs; "
    return found


def generated(mode: Any) -> tuple[bool, str]:
    """Return whether the tokens of this rank are the model's, and the refusal of sampling."""
    model = causal_model("gpt2")
    constraints = Constraints(split_spec={"transformer.h.1": "beginning"}) if "pipeline" in mode else None
    example = (torch.zeros(4, 8, dtype=torch.long),)
    pm = partition(model, int(os.environ["WORLD_SIZE"]), mode, example_inputs=example, constraints=constraints)
    ids = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    arguments: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    equal = torch.equal(pm.generate(ids, **arguments), model.generate(ids, **arguments))
    try:
        pm.generate(ids, **{**arguments, "do_sample": True})
    except ConfigError as error:
        return equal, error.problem
    return equal, ""


def wrapped_in_ddp() -> tuple[str, float]:
    """Call a module with a partitioned model in it through DistributedDataParallel: what is said, and the distance if it is left alone."""
    torch.manual_seed(0)
    body, head = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    pm = partition(body, 2, "fsdp", example_inputs=(x,), progress=False)
    module = nn.Sequential(pm, head)
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, [f"0.{name}" for name, _ in pm.named_parameters()])
    alone = float((ddp(module)(x) - head(body(x))).abs().max())
    ddp._set_params_and_buffers_to_ignore_for_model(module, [])
    try:
        ddp(module)(x)
    except ConfigError as error:
        return str(error), alone
    return "", alone
