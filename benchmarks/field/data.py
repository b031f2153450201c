"""Bytes, messages and types of data parallelism, counted beside DistributedDataParallel and FSDP2 on 4 processes with gloo.

python -m benchmarks.field --parts data

A GPT is trained for some steps, and the collectives of one step are counted:

mode         peer
data         DistributedDataParallel; under autocast for bf16-mixed, with bf16_compress_hook for reduce_dtype="bfloat16"
fsdp         FSDP2: fully_shard on every block and on the whole, with MixedPrecisionPolicy
zero1/2      FSDP2 with reshard_after_forward=False
data+fsdp    FSDP2 on a mesh of 2 x 2: replicas of shards

"by block" recomputes each block, with torch.utils.checkpoint in the peer.

Bytes are those that a rank sends in a step for each parameter of the model: all_reduce of s bytes over n ranks 2 s (n-1)/n, all_gather and
reduce_scatter of s bytes altogether s (n-1)/n, as rings do. ``formula`` is Rajbhandari et al. (ZeRO, 2020): over n ranks each parameter is
gathered g times in its type, and its gradient summed once. Parameters that autocast reads in float32 (the embedding, norms) are gathered in
float32 by ours; FSDP2's policy casts them, which computes other numbers than autocast on one device.

Collectives of ours are those of the program of a rank. The last column of types is of sums of gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.rounds import table
from benchmarks.transformer import VOCABULARY, Block, gpt, loss_of
from partitioner import PartitionWarning, partition
from passes.ir.comm.primitives import all_gather, all_reduce, reduce_scatter
from passes.ir.torch_private import TorchDispatchMode, tree_leaves

RANKS, LAYERS, WIDTH = 4, 4, 512
Mode = str | Mapping[str, int]

MODES: Mapping[str, Mode] = {"data": "data", "fsdp": "fsdp", "zero1": "zero1", "zero2": "zero2", "data+fsdp": {"data": 2, "fsdp": 2}}
POLICIES: tuple[tuple[str | None, str | None], ...] = ((None, None), ("bf16-mixed", None), ("bf16-mixed", "bfloat16"), ("bf16-true", None))
"""``precision=`` and ``reduce_dtype=``."""


@dataclass(frozen=True)
class Case:
    """A line of the table: a mode, ``precision=``, ``reduce_dtype=``, and whether each block is recomputed."""

    name: str
    mode: Mode
    precision: str | None
    reduce_dtype: str | None
    by_block: bool = False

    @property
    def words(self) -> str:
        """The precision, in words."""
        return (self.precision or "float32") + (", sums in bfloat16" if self.reduce_dtype else "")


CASES = [
    Case(name + (", by block" if by_block else ""), mode, *policy, by_block)
    for name, mode in MODES.items()
    for by_block in ((False, True) if name == "fsdp" else (False,))
    for policy in POLICIES
]

TIMES: Mapping[Any, int] = {all_gather: 1, all_reduce: 2, reduce_scatter: 1}
"""Collective -> times that a rank sends its parts of what is gathered or summed."""

SENT: Mapping[str, Callable[[Sequence[Tensor]], tuple[int, int]]] = {
    "allreduce_": lambda given: (2, given[0].nbytes),
    "_allgather_base_": lambda given: (1, given[0].nbytes),
    "_reduce_scatter_base_": lambda given: (1, given[1].nbytes),
}
"""Collective of a process group -> times that its tensor is sent, but for the rank's own part, and its bytes."""


@dataclass
class Counted:
    """Collectives of a step.

    Attributes:
        n_bytes: that this rank sends.
        messages: calls of collectives.
        sums: types in which gradients are summed.
    """

    n_bytes: float = 0.0
    messages: int = 0
    sums: set[str] = field(default_factory=set)


class Traffic(TorchDispatchMode):
    """Count the collectives of process groups: messages of more than ``least`` bytes; losses and flags have less."""

    least = 64

    def __init__(self, counted: Counted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.counted = counted

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run an operator; count it if it is a collective."""
        name = function.overloadpacket.__name__
        if function.namespace == "c10d" and name in SENT:
            given = tree_leaves(args)
            group = next(each for each in given if isinstance(each, torch.ScriptObject))
            self._count(name, [each for each in given if isinstance(each, Tensor)], dist.ProcessGroup.unbox(group).size())
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, tensors: Sequence[Tensor], n_ranks: int) -> None:
        times, n_bytes = SENT[name](tensors)
        if n_bytes > self.least:
            self.counted.n_bytes += times * n_bytes * (n_ranks - 1) / n_ranks
            self.counted.messages += 1
            if "reduce" in name:
                self.counted.sums.add(str(tensors[0].dtype).removeprefix("torch."))


def peer(model: nn.Module, mode: Mode, precision: str | None, reduce_dtype: str | None) -> nn.Module:
    """Return the model as DistributedDataParallel or FSDP2 trains it on all processes."""
    model = model.bfloat16() if precision == "bf16-true" else model
    if mode == "data":
        replica = DistributedDataParallel(model)
        if reduce_dtype:
            # torch refuses its own hook over gloo, by its name, and annotations that are strings.
            replica.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))  # noqa: PLW0108
        return replica
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if isinstance(mode, Mapping):
        options["mesh"] = init_device_mesh("cpu", (mode["data"], mode["fsdp"]), mesh_dim_names=("replicas", "shards"))
    elif mode in ("zero1", "zero2"):
        options["reshard_after_forward"] = False
    if precision == "bf16-mixed":
        wide = torch.bfloat16 if reduce_dtype else torch.float32
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=wide)
    for block in model.children():
        if isinstance(block, Block):
            fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def formula(case: Case) -> float:
    """Return the bytes a parameter by the formula of the module."""
    gathered = 4 if case.precision is None else 2
    summed = 2 if case.reduce_dtype or case.precision == "bf16-true" else 4
    if case.mode == "data":
        return 2 * summed * (RANKS - 1) / RANKS
    if isinstance(case.mode, Mapping):
        shards, replicas = case.mode["fsdp"], case.mode["data"]
        return (2 * gathered + summed) * (shards - 1) / shards + 2 * summed / shards * (replicas - 1) / replicas
    return ((2 if case.mode == "fsdp" else 1) * gathered + summed) * (RANKS - 1) / RANKS


def count_theirs(case: Case, tokens: Tensor) -> Counted:
    """Return what a step of the peer sends."""
    model = gpt(LAYERS, WIDTH)
    for block in model.children():
        if case.by_block and isinstance(block, Block):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    trained, own = peer(model, case.mode, case.precision, case.reduce_dtype), tokens.chunk(RANKS)[dist.get_rank()]

    def step() -> None:
        trained.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.mode == "data" and case.precision == "bf16-mixed"):
            loss = _loss(trained(own), own)
        loss.backward()

    for _ in range(2):  # DistributedDataParallel rearranges its buckets in the second step
        step()
    counted = Counted()
    with Traffic(counted):
        step()
    return counted


def count_ours(case: Case, tokens: Tensor) -> Counted:
    """Return what the program of a rank sends in a step."""
    options: dict[str, Any] = {"precision": case.precision, "reduce_dtype": case.reduce_dtype, "progress": False}
    recompute = "full" if case.by_block else "none"
    pm = partition(gpt(LAYERS, WIDTH), RANKS, case.mode, example_inputs=(tokens,), recompute=recompute, **options)
    pm.train_step(tokens, target=tokens, loss_fn=_loss)
    counted = Counted()
    for node in pm.graph(0).graph.nodes:
        if node.target in TIMES and node.meta["bytes"] > Traffic.least:
            n_ranks, n_bytes = len(node.kwargs["group"]), node.meta["bytes"]
            times = n_ranks if node.target is all_gather else TIMES[node.target]  # a gather is given a part
            counted.n_bytes += times * n_bytes * (n_ranks - 1) / n_ranks
            counted.messages += 1
            if node.target is not all_gather:
                counted.sums.update(str(operand.meta["val"].dtype).removeprefix("torch.") for operand in node.args[0])
    return counted


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return loss_of(output.float(), target)


def _tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (RANKS, 8), generator=torch.Generator().manual_seed(0))


def main(_: Sequence[str] = ()) -> None:
    """Count ours in this process and the peers in others, and print the table."""
    warnings.simplefilter("ignore", PartitionWarning)
    torch.set_num_threads(1)
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "peers.json"
        command = [sys.executable, *launcher, "-m", "benchmarks.field.data", "--worker", str(results)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        peers = [Counted(**each) for each in json.loads(results.read_text(encoding="utf-8"))]
    n_parameters = sum(parameter.numel() for parameter in gpt(LAYERS, WIDTH).parameters())
    rows = []
    for case, theirs in zip(CASES, peers, strict=True):
        both = (theirs, count_ours(case, _tokens()))
        sizes = [formula(case), *(each.n_bytes / n_parameters for each in both)]
        sums = [", ".join(sorted(each.sums)) for each in both]
        cells = [*(f"{size:.2f}" for size in sizes), *(str(each.messages) for each in both), *sums]
        rows.append((case.name, case.words, *cells))
    title = f"Data parallelism over {RANKS} ranks, GPT of {LAYERS} blocks of width {WIDTH}: bytes a parameter that a rank sends in a step"
    table(title, ("mode", "precision", "formula", "peer", "ours", "messages, peer", "ours", "sums, peer", "ours"), rows)


def _run_worker(results: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    dist.init_process_group("gloo")
    found = [count_theirs(case, _tokens()) for case in CASES]
    if dist.get_rank() == 0:
        results.write_text(json.dumps([{**dataclasses.asdict(each), "sums": sorted(each.sums)} for each in found]), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        _run_worker(given.worker)
    else:
        main()
