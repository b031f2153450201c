"""Run a range of seeds: ``python -m tests.fuzz 0:500 --workers 2``, or ``python -m tests.fuzz 0:200 --processes 2``.

Every seed is a random model and a random way to partition it; see ``tests.fuzz.programs.generator``. A failure is reduced and printed as a
script.
The exit status is 1 where a seed gave a wrong result, an error from inside, or did not end.
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.running.campaign import Campaign


def main() -> int:
    """Run the seeds of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random models, partitioned at random, beside the same in one piece."
    )
    parser.add_argument("seeds", nargs="?", default="0:500", help="FIRST:LAST, the last not included, or seeds with commas between them")
    parser.add_argument("--workers", type=int, default=1, help="processes that run seeds")
    parser.add_argument("--processes", type=int, default=0, help="ranks of each plan, each a process of a gloo group; 0: all ranks in one")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long one seed may take")
    parser.add_argument("--no-reduce", action="store_true", help="print failures as they were generated")
    parser.add_argument("--log", help="a file that gets one line for each seed")
    options = parser.parse_args()
    first, colon, last = options.seeds.partition(":")
    seeds = list(range(int(first), int(last))) if colon else [int(each) for each in options.seeds.split(",")]
    campaign = Campaign(seconds=options.seconds, is_reducing=not options.no_reduce, log=options.log)
    if options.processes:
        campaign.run_over_processes(seeds, options.processes)
    else:
        campaign.run(seeds, options.workers)
    sys.stdout.write(campaign.summary())
    return int(campaign.has_failed)


if __name__ == "__main__":
    sys.exit(main())
