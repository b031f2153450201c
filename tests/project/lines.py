"""Count the lines of code of the packages, without docstrings, comments and blank lines.

python -m tests.project.lines
"""

from __future__ import annotations

import ast
from collections import Counter

from tests.project.architecture.source_tree import PACKAGES, Source, sources


def code_lines(source: Source) -> int:
    """Return the lines of a file that have code: no blank ones, no comments, no strings that stand alone."""
    texts = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    documented = {line for each in texts for line in each}
    lines = enumerate(source.text.splitlines(), start=1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and number not in documented for number, line in lines)


def lines_of_packages() -> Counter[str]:
    """Return package -> its lines of code."""
    found: Counter[str] = Counter()
    for source in sources():
        package = source.path.partition("/")[0]
        if package in PACKAGES:
            found[package] += code_lines(source)
    return found


if __name__ == "__main__":
    counts = lines_of_packages()
    print(*(f"{package:12} {count:6,}" for package, count in counts.items()), f"{'all':12} {counts.total():6,}", sep="\n")  # noqa: T201
