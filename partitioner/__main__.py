"""``python -m partitioner``: the command line."""

from __future__ import annotations

from partitioner.cli import main

raise SystemExit(main())
