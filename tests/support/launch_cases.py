"""Functions of worker processes in the tests of launches and device meshes: each function runs on every rank at once."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from partitioner import PartitionedModel, PartitionError, partition
from partitioner.runtime.process.session import _sessions as sessions
from partitioner.runtime.torchrun import TorchrunRuntime

Mode = str | Mapping[str, int | tuple[int, ...]]


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 8)).double()


def batch() -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, target


def difference(pm: PartitionedModel, reference: nn.Module) -> float:
    """Return the largest difference of outputs, loss, gradients and weights of two steps of SGD, against the unpartitioned model."""
    x, target = batch()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pm, reference)]
    worst = [(pm(x) - reference(x)).abs().max()]
    for _ in range(2):
        loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        expected = nn.functional.mse_loss(reference(x), target)
        expected.backward()
        found = pm.full_gradients()
        worst += [
            (loss - expected).abs(),
            *((whole(found[name]) - whole(each.grad)).abs().max() for name, each in reference.named_parameters()),
        ]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = pm.full_state_dict()
    worst += [(state[name] - each).abs().max() for name, each in reference.state_dict().items()]
    return max(float(each.detach()) for each in worst)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def trained(devices: Any, mode: Mode = "auto", seed: int = 0, **arguments: Any) -> tuple[float, PartitionedModel]:
    """Return the difference of a model that is trained on ``devices``, and the model."""
    pm = partition(model(seed), devices, mode, example_inputs=batch()[:1], progress=False, **arguments)
    return difference(pm, model(seed)), pm


def where(pm: PartitionedModel) -> tuple[tuple[str, ...], int]:
    """Return the names of the plan's mesh, and the rank that this process has."""
    return pm.plan.grid.names, pm.traced.runtime.local_ranks[0]


def mesh_of_names(names: tuple[str, ...]) -> tuple[float, tuple[str, ...], int]:
    """Return a mesh of 2 x 2 whose names alone say the mode."""
    found, pm = trained(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    return (found, *where(pm))


def permuted_mesh(mode: Mode, names: tuple[str, ...] | None) -> tuple[float, int, list[Tensor]]:
    """Process 3 has rank 0; also the parts of the first weight, in the order of ranks, as each process holds them."""
    found, pm = trained(DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=names), mode)
    _, rank = where(pm)
    return found, rank, [tensor.clone() for _, tensor in pm.named_parts(rank)]


def disjoint_submeshes() -> tuple[float, float, int]:
    """Train two models at once, on processes 0, 1 and on 2, 3, with weights of their own; then one on 0, 2 and on 1, 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    first = dist.get_rank() < 2
    found, pm = trained(mesh["tensor"], seed=1 if first else 2)
    other, _ = trained(mesh["data"], seed=3)
    return found, other, where(pm)[1]


def models_on_overlapping_meshes() -> list[float]:
    """Process 1 is in two meshes: it has more process groups than the others, and yet they connect."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 1]), DeviceMesh("cpu", [1, 3, 0])]
    return [trained(mesh, "tensor" if mesh.size() == 2 else "fsdp")[0] for mesh in meshes if mesh.get_coordinate() is not None]


def dropout_and_copies() -> list[float]:
    """Run on a part of the processes in another order: masks of dropout, a copy and a pickle."""
    mesh = DeviceMesh("cpu", [3, 1], mesh_dim_names=("tp",))
    if mesh.get_coordinate() is None:
        return [0.0]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)).double()
    pm = partition(network, mesh, example_inputs=batch()[:1], progress=False)
    found = []
    for each in (pm, copy.deepcopy(pm), pickle.loads(pickle.dumps(pm))):  # noqa: S301  our own
        torch.manual_seed(dist.get_rank())
        result = each(batch()[0])
        torch.manual_seed(3)  # the ranks of a part take the random numbers of its first rank, which is process 3
        found.append(float((result - network(batch()[0])).detach().abs().max()))
    return found


def own_rows_on_a_permuted_mesh() -> float:
    """Train with each process's rows by its place in the mesh, as ``DistributedSampler`` distributes them."""
    mesh = DeviceMesh("cpu", [2, 0, 3, 1], mesh_dim_names=("data",))
    network, (x, target) = model(), batch()
    pm = partition(network, mesh, example_inputs=(x[:2],), inputs="local", progress=False)
    assert pm.data_parallel_rank == [2, 0, 3, 1].index(dist.get_rank())
    rows = slice(pm.data_parallel_rank, None, 4)
    pm.train_step(x[rows], target=target[rows], loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(network(x), target).backward()
    found = pm.full_gradients()
    return max(float((whole(found[name]) - whole(each.grad)).abs().max()) for name, each in network.named_parameters())


def one_process_meshes() -> tuple[float, int]:
    """Train on a mesh of one process in a world of several, which has all of the model."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "tensor"))
    found, pm = trained(mesh["tensor"], seed=dist.get_rank())
    return found, len(pm.dtensor_state_dict())


def failure_in_a_submesh() -> str | float:
    """Process 3 has other rows than process 2, which both learn; processes 0 and 1 train on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas of a sweep", "tensor"))["tensor"]
    if dist.get_rank() < 2:
        return trained(mesh)[0]
    pm = partition(model(), mesh, example_inputs=batch()[:1], progress=False)
    try:
        pm(batch()[0] + dist.get_rank())
        pm.full_state_dict()
    except PartitionError as error:
        return str(error)
    return "none"


def refusals() -> list[str | None]:
    """Return the errors in a world of four."""
    pm = partition(model(), DeviceMesh("cpu", [1, 0, 3, 2], mesh_dim_names=("tp",)), example_inputs=batch()[:1], progress=False)
    try:
        pm.dtensor_state_dict()
    except PartitionError as error:
        return [refusal(2, "tensor"), str(error)]
    return [None, None]


def submesh_without_me() -> str | None:
    """Return the error where processes 2 and 3 are not in the mesh."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    return refusal(mesh)


def refusal(devices: Any, mode: Mode = "auto") -> str | None:
    """Return the error of ``partition``; None if there is none."""
    try:
        partition(model(), devices, mode, example_inputs=batch()[:1], progress=False)
    except Exception as error:  # noqa: BLE001  which one is compared
        return f"{type(error).__name__}: {error}"
    return None


@contextlib.contextmanager
def scripted(init_method: str | None = None, backend: str = "gloo", order: int = 1, seconds: int = 40) -> Iterator[None]:
    """Enter a process group made by a script: no torchrun environment, and reversed ranks with ``order=-1``."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("TORCHELASTIC", "MASTER_", "LOCAL_"))}
    rank, size = int(kept.setdefault("RANK", os.environ.pop("RANK"))), int(kept.setdefault("WORLD_SIZE", os.environ.pop("WORLD_SIZE")))
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        number = rank if order == 1 else size - 1 - rank
        if init_method is not None:
            timeout = timedelta(seconds=seconds)
            dist.init_process_group(backend, init_method=init_method, rank=number, world_size=size, timeout=timeout)
        yield
    finally:
        os.environ.update(kept)
        if dist.is_initialized():
            dist.destroy_process_group()


def group_by(init_method: str, mode: Mode, backend: str = "gloo") -> tuple[float, int, float]:
    """Return results of a script's reversed group: the difference, the rank of this process, and the seconds of waits."""
    with scripted(init_method, backend, order=-1):
        found, pm = trained(dist.get_world_size(), mode)
        assert isinstance(pm.traced.runtime, TorchrunRuntime)
        return found, where(pm)[1], pm.traced.runtime._connection.timeout.total_seconds()


def groups_made_again(init_method: str) -> list[float]:
    """Return differences of a script's group made twice at one address, each with a model; a model of a destroyed group says so."""
    found, errors = [], []
    for _ in range(2):
        with scripted(init_method):
            difference_of_this, pm = trained(dist.get_world_size(), "tensor")
            found.append(difference_of_this)
        errors.append(refusal_of_call(pm))
    assert all("process group was destroyed" in error for error in errors), errors
    return found


def own_group_made_again() -> list[float]:
    """Destroy, as a script, the group that this package has made."""
    found = []
    for mode in ("tensor", "data"):
        found.append(trained(int(os.environ["WORLD_SIZE"]), mode)[0])
        dist.destroy_process_group()
    return found


def refusal_of_call(pm: PartitionedModel) -> str:
    try:
        pm(batch()[0])
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "none"


def launched_by(names: Mapping[str, str], address: str | None) -> tuple[str | None, float | None]:
    """Return processes that another launcher started, without a group: the refusal, or the difference."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    with scripted():
        made = {name: value.format(rank=rank, size=size) for name, value in names.items()}
        if address is not None:
            made |= dict(zip(("MASTER_ADDR", "MASTER_PORT"), address.split(":"), strict=True))
        os.environ.update(made)
        try:
            if address is None:
                sessions.clear()  # of earlier tests: their processes have met
                return refusal(int(size), "tensor"), None
            return None, trained(int(size), "tensor")[0]
        finally:
            for name in made:
                del os.environ[name]
