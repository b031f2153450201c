"""Let accelerate count replicas of a partitioned model, not processes: its number of processes decides which batches each one reads.

                      inputs="global": every rank reads every batch     inputs="local", one replica a process
num_processes         1                                                 as started
loader                not distributed                                   distributed over processes
scheduler             a step for a step of the optimizer                as many steps as processes, as with DistributedDataParallel
gather()              the tensor itself, which every rank has           rows of all processes
broadcast()           to all processes                                  to all processes
process_index         as started: the first process writes files        as started
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from partitioner.integrations.random_states import share_random_states
from partitioner.model.session import Session
from passes.ir.errors import ConfigError

__all__ = ["count_replicas", "counts_replicas", "passes_own_rows", "wait_for_all"]

_OTHER_WAYS = {"FSDP": "fsdp_plugin", "DEEPSPEED": "deepspeed_plugin", "MEGATRON_LM": "megatron_lm_plugin"}
"""Type of accelerate's distribution -> the argument of ``Accelerator`` that chooses it."""

_INPUTS = "inputs of partitioned models"
"""Key in accelerate's shared state: what processes of the prepared models pass."""


def count_replicas(session: Session) -> None:
    """Set accelerate's number of processes for a model with one rank a process.

    Raises:
        ConfigError: the ``Accelerator`` was asked to shard models itself, or deals batches to ranks that need the same ones.
    """
    from accelerate.state import AcceleratorState, PartialState, is_initialized  # noqa: PLC0415  an optional package
    from accelerate.utils import DistributedType  # noqa: PLC0415

    if not is_initialized():
        return
    state = AcceleratorState()
    plugin = _OTHER_WAYS.get(state.distributed_type.value)
    if plugin is not None or getattr(state, "parallelism_config", None) is not None:
        plugin = plugin or "parallelism_config"
        raise ConfigError(
            f"Accelerator({plugin}=...) would shard a model that is partitioned already",
            remedy=f"Accelerator() without {plugin}, and partition(model, mode=...) with the mode for it; with accelerate launch, a "
            "configuration without it; with Trainer, TrainingArguments() without fsdp=, deepspeed= and parallelism_config=",
        )
    if PartialState().__dict__.setdefault(_INPUTS, session.tracing.inputs) != session.tracing.inputs:
        raise ConfigError(
            "one Accelerator prepares two partitioned models, whose processes are one model for one of them and replicas for the other",
            remedy='partition both with inputs="global", or both with inputs="local"',
        )
    if counts_replicas() or state.num_processes == 1:
        return
    n_replicas = session.lowerings.rows.count
    if session.tracing.inputs == "local":
        if n_replicas != state.num_processes:
            raise ConfigError(
                f'Accelerator.prepare(loader) deals batches to all {state.num_processes} processes, and with inputs="local" ranks of one '
                f"replica need the same rows: there are {n_replicas} replicas",
                remedy='partition(..., inputs="global"): then every process reads every batch',
            )
        return
    for shared in (PartialState().__dict__, state.__dict__):
        shared.update(distributed_type=DistributedType.NO, num_processes=1)
    PartialState().__dict__["wait_for_everyone"] = wait_for_all
    share_random_states()


def counts_replicas() -> bool:
    """Whether accelerate counts one process where there are several."""
    from accelerate.state import PartialState, is_initialized  # noqa: PLC0415  an optional package

    return is_initialized() and PartialState().__dict__.get("wait_for_everyone") is wait_for_all


def passes_own_rows() -> bool:
    """Whether each process passes its own rows to the prepared models: a scalar that these return is of the rows of all."""
    from accelerate.state import PartialState, is_initialized  # noqa: PLC0415  an optional package

    return bool(is_initialized() and PartialState().__dict__.get(_INPUTS) == "local")


def wait_for_all() -> None:
    """Wait until all processes have come here."""
    if dist.get_backend() == "nccl":
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()
