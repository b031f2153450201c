"""Read and write fixture pairs: a model, the options of its lowering, and the graphs before and after a pass.

    The first weight is sharded by columns, the second by rows: one all_reduce, after the second.

    phase="shard", mesh={"tensor": 2}, axes={"ffn": "tensor"}

    ---- model
    x = torch.randn(4, 6)
    up, down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))

    ---- before: model
    forward(batch, p_up_weight [8, 6], ..., x [batch, 6]):
        ...

    ---- after: rank_0, rank_1
    ...

The sections after a pass are the graphs that it changed; equal texts share a section. See ``docs/design/0030-reports-sweeps-and-tests.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from passes.graph.program_printer import program_text


@dataclass(frozen=True)
class Pair:
    """Hold a fixture without its graphs.

    Attributes:
        title: one sentence about the case.
        options: the source of the keyword options.
        model: the source of the model.
    """

    title: str
    options: str
    model: str

    def keywords(self) -> dict[str, Any]:
        """Return the options by name."""
        found: dict[str, Any] = eval(f"dict({self.options})", {"__builtins__": {"dict": dict}})  # noqa: S307  our own fixtures
        return found

    def text(self, before: Mapping[str, str], after: Mapping[str, str]) -> str:
        """Return the text of the whole fixture.

        Args:
            before, after: name of a graph -> its text.
        """
        changed = {name: text for name, text in after.items() if before.get(name) != text}
        before = {name: text for name, text in before.items() if f"{name}_forward" not in before}  # a stage and its training graphs
        sections = [f"---- model\n{self.model}\n", *_sections("before", before), *_sections("after", changed)]
        return "\n".join([f"{self.title}\n\n{self.options}\n", *sections])


def read_pair(text: str) -> Pair:
    """Read the head and the model of a fixture; graphs may be missing."""
    head, model, *_ = re.split(r"^---- .*\n", text, flags=re.MULTILINE)
    title, _, options = head.strip().rpartition("\n\n")
    return Pair(title, options, model.strip())


def _sections(where: str, texts: Mapping[str, str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return [f"---- {where}: {', '.join(alike)}\n{text}\n" for text, alike in names.items()]


def graph_text(graph: fx.Graph) -> str:
    """Return the text of a graph without imports, with sizes of tensor placeholders and their type unless it is float64."""
    _, _, calls = program_text(graph).partition("def forward")
    lines = [line.removeprefix("    ") if not line.startswith("    ") else line for line in calls.splitlines()[1:]]
    arguments = ", ".join(_argument(node) for node in graph.nodes if node.op == "placeholder")
    batch = next((str(node.meta["val"]) for node in graph.nodes if node.op == "placeholder" and node.name == "batch"), "")
    text = "\n".join([f"forward({arguments}):", *lines]).rstrip()
    return re.sub(r"\bs\d+\b", lambda symbol: "length" if batch and symbol[0] != batch else "batch", text)


def _argument(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return node.name
    sizes, dtype = ", ".join(map(str, value.shape)), str(value.dtype).removeprefix("torch.")
    return f"{node.name} [{sizes}]" + ("" if dtype == "float64" else f" {dtype}")
