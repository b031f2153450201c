"""Prepare accelerate and transformers' Trainer for a partitioned model when they first ask it something, before they prepare it.

``Accelerator.prepare`` looks for ``hf_device_map`` on every module of a model, ``Trainer.__init__`` on the outermost alone: once there is a
partitioned model in several processes, it looks on all. None of these libraries is imported for it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from partitioner.integrations.after_import import after_import

if TYPE_CHECKING:
    from types import ModuleType

    from partitioner.model.session import Session

__all__ = ["await_trainer", "prepare_libraries"]


def prepare_libraries(session: Session) -> None:
    """Prepare those libraries that are imported and set up; called whenever a partitioned model is asked for ``hf_device_map``."""
    if "accelerate" not in sys.modules or _has_all_ranks(session):
        return
    from partitioner.integrations.accelerate.broadcasts import replace_functions  # noqa: PLC0415  importing partitioner imports little
    from partitioner.integrations.accelerate.methods import replace_methods  # noqa: PLC0415  importing partitioner imports little
    from partitioner.integrations.accelerate.processes import count_replicas  # noqa: PLC0415

    count_replicas(session)
    replace_methods()
    replace_functions()


def await_trainer(session: Session) -> None:
    """Prepare Trainer when it is imported, or now if it is; called whenever there is a new partitioned model."""
    if not _has_all_ranks(session):
        after_import(["transformers.trainer"], _prepare_trainer)


def _prepare_trainer(_module: ModuleType) -> None:
    from partitioner.integrations.transformers.methods import replace_methods  # noqa: PLC0415  importing partitioner imports little

    replace_methods()


def _has_all_ranks(session: Session) -> bool:
    """Whether all ranks are in this process: then a partitioned model is a module like any other."""
    return len(session.runtime.local_ranks) == session.runtime.n_ranks
