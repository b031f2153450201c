"""Texts are about the product, in the field's words: no notes, no machine's paths, no private words."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

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

PRIVATE_WORDS = {
    r"behind": "after",
    r"in front of": "before",
    r"lies|lie|lying": "is stored, is sharded, is in",
    r"nobody|somebody|anybody|whoever": "name the part, or use the passive",
    r"who|whom": "name the rank, process or function",
    r"unlike": "different",
    r"is others|are others|be others|others than": "differ",
    r"in the place of": "instead of",
    r"very same|by that name": "the same, so named",
    r"(is|was|are|were|be) told|told (of|apart)": "given, reported, distinguished",
    r"pays|payment|dealt|pace|promises|meetings": "costs, distributed, clock rate, guarantees, partial sums",
    r"take turns|takes turns|in turn|turns at": "alternate, round-robin",
    r"bundles?|bundled": "coalesced collectives",
    r"garbage(?! collection)": "gc_paused",
    r"written out": "decomposed, inlined",
    r"rows( of the batch)? meet|asks? for nothing": "mixes rows, is empty",
}
"""Words that this project once used for known things -> the words of PyTorch and of the literature."""

NAMES = {"critical_paths.py": "behind", "run_tables.py": "behind", "test_axis_choice.py": "pace"}
"""Files with a variable of such a name in their drawings -> the name."""

_CODE = re.compile(r"``[^`]*``|`[^`]*`|\{[^{}]*\}")


def prose(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments, docstrings, messages and pages, with their numbers, without code."""
    if path.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
                for number, line in enumerate(token.string.splitlines(), start=token.start[0]):
                    yield number, _CODE.sub("", line)
    elif path.endswith((".md", ".toml")):
        for number, line in enumerate(text.splitlines(), start=1):
            yield number, _CODE.sub("", line)


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


def test_private_words() -> None:
    words = {re.compile(rf"(?i)\b({pattern})\b"): remedy for pattern, remedy in PRIVATE_WORDS.items()}
    offences = []
    for path, text in text_files():
        if path.endswith("test_wording.py"):
            continue
        candidates = {word: remedy for word, remedy in words.items() if word.search(text)}
        for number, line in prose(path, text) if candidates else ():
            for word, remedy in candidates.items():
                if (found := word.search(line)) and NAMES.get(path.rpartition("/")[2]) != found[0]:
                    offences.append(f"{path}:{number}: {found[0]} -> {remedy}: {line.strip()[:80]}")
    assert not offences, report(offences, "use the words of PyTorch and of the literature")


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    clause = re.compile(r'"""(What|Who|Which|Where)\b')
    offences = [
        f"{path}:{number}: {line.strip()[:80]}"
        for path, text in text_files()
        if path.endswith(".py") and clause.search(text)
        for number, line in enumerate(text.splitlines(), start=1)
        if clause.search(line)
    ]
    assert not offences, report(offences, "functions: an imperative; data and modules: the noun that the clause stands for")
