"""Every text speaks to its reader about the product: no notes to oneself, nobody's machine, nobody's way of working."""

from __future__ import annotations

import re

import pytest

from tests.project.architecture.source_tree import report, text_files

# Each is written so that it does not match itself.
UNWANTED = {
    r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b": "do it, or describe the limit as a fact",
    r"(?<![\w.])/(wor[k]|tm[p]|roo[t]|hom[e])/\w": "no path of one machine: use a path from the root, or a temporary folder",
    r"\.\./share[d]": "say it here, or name a public source",
    r"\b(DESIG[N] \d|DESIG[N]\.md|AP[I]\.md|FIELD_NOTE[S])": "say it here, or name a file of this repository",
    r"(?i)(?<!pytorch )\bissu[e] #?\d": "describe the problem instead",
    r"(?i)\b(by|with) (an )?a[i]\b|\ba[i][- ](generated|written|assisted)": "text is about the product",
    r"(?i)\b(assistan[t]|sub-?agen[t]|co-authore[d])": "text is about the product",
    r"(?i)\bfor no[w]\b|simplifie[d] version|not implemente[d] yet": "finish it, or refuse by name with an error",
}


@pytest.mark.parametrize("pattern", UNWANTED)
def test_wording(pattern: str) -> None:
    expression = re.compile(pattern)
    offences = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in text_files()
        if path != "LICENSE" and expression.search(text)
        for number, line in enumerate(text.splitlines(), start=1)
        if expression.search(line)
    ]
    assert not offences, report(offences, UNWANTED[pattern])
