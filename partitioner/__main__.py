"""``python -m partitioner``: the command line."""

from __future__ import annotations

from partitioner.command_line import main

raise SystemExit(main())
