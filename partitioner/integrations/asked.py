"""Prepare accelerate and transformers' Trainer for a partitioned model when they first ask it something, before they prepare it.

``Accelerator.prepare`` and ``Trainer.__init__`` look for ``hf_device_map`` on every model. None of these libraries is imported for it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partitioner.model.session import Session

__all__ = ["prepare_libraries"]


def prepare_libraries(session: Session) -> None:
    """Prepare those libraries that are imported and set up; called whenever a partitioned model is asked for ``hf_device_map``."""
    if "accelerate" not in sys.modules or len(session.runtime.local_ranks) == session.runtime.n_ranks:
        return  # with all ranks in one process a partitioned model is a module like any other
    from partitioner.integrations.accelerate.broadcasts import replace_functions  # noqa: PLC0415  importing partitioner imports little
    from partitioner.integrations.accelerate.methods import replace_methods  # noqa: PLC0415  importing partitioner imports little
    from partitioner.integrations.accelerate.processes import count_replicas  # noqa: PLC0415

    count_replicas(session)
    replace_methods()
    replace_functions()
    if "transformers.trainer" in sys.modules:
        from partitioner.integrations.trainer.methods import replace_methods as replace_methods_of_trainer  # noqa: PLC0415

        replace_methods_of_trainer()
