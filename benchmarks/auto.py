"""The plan that ``mode="auto"`` finds beside the one that was published: both simulated, on the same devices, for the same model and batch.

    python -m benchmarks.auto                # every row of the published table; minutes
    python -m benchmarks.auto --rows 22B     # one

The published configuration (Korthikanti et al., arXiv 2205.05198, table 5) is taken under the policy of recomputation with which it is
fastest. Neither is run: both are stepped through on the clock of ``Cluster.preset("a100-80gb")``, as ``benchmarks.published`` does, whose
figures stand beside measured ones. A ratio of at most 1 says that the plan that was found is no worse.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.published import SEQUENCE, Gpt, Row, predict, rows, simulated, update_seconds
from cost_models.hardware.clusters import Cluster
from partitioner.experiments.models.subject import trace_subject
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.auto import plans_auto
from partitioner.planner.search.describe import words_of
from partitioner.specialize.simulate_plan import timed_programs
from passes.ir.plan import Plan

POLICIES = ("full", "seqsel")


def chosen(row: Row) -> tuple[Plan, float]:
    """Return the plan found for a row's model, devices and batch, and the seconds of an iteration."""
    sizes = row.sizes
    with torch.device("meta"):
        model = Gpt(sizes["layers"], sizes["hidden"], sizes["heads"]).half()
        tokens = torch.zeros(sizes["global_batch"], SEQUENCE, dtype=torch.int64)
    cluster = Cluster.preset("a100-80gb", nodes=sizes["devices"] // 8, devices_per_node=8)
    subject = trace_subject(row.name, (model, (tokens, tokens)), training=True)
    request = PlanRequest(mode="auto", devices=("meta",) * sizes["devices"], modules=subject.modules)
    started = time.process_time()
    plan = plans_auto(subject.graph, cluster, request)[0]
    print(f"# {row.name}: planned in {time.process_time() - started:.1f} s, gap {plan.gap:.2f}", flush=True)
    simulation = simulated(timed_programs(subject.traced, plan, fused_attention=True), cluster, plan.batch_size)
    return plan, simulation.step_time + update_seconds(simulation, cluster)


def main() -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser(description="Plans that are found beside published ones.")
    parser.add_argument("--rows", nargs="*", help="names of rows; all where nothing is said")
    arguments = parser.parse_args()
    for row in rows():
        if arguments.rows and row.name not in arguments.rows:
            continue
        plan, seconds = chosen(row)
        published = min(predict(row, policy).seconds for policy in POLICIES)
        told = f"published {published:.2f} s, found {seconds:.2f} s ({seconds / published:.2f}x)"
        print(f"{row.name} on {row.sizes['devices']:>3}: {told}: {words_of(plan)}", flush=True)


if __name__ == "__main__":
    main()
