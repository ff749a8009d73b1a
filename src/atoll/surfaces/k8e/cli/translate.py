"""Differences when the program is called k8e, k8e-sandbox or k8e-sandbox-cli: two words, and nothing else.

`--profile` names a connection there (atoll's own name for that is `--context`), and the standalone program's verbs may
stand without the word `sandbox`.
"""

from __future__ import annotations

import os
import sys

from atoll.cli.verbs import BY_NAME, GROUPS


def translate(words: list[str]) -> list[str]:
    """The same command line in atoll's words."""
    standalone = os.path.basename(sys.argv[0]).startswith("k8e-sandbox")
    verbs = {name.split()[1] for name in BY_NAME if name.startswith("sandbox ")}
    if standalone and words and words[0] in verbs and words[0] not in GROUPS:
        words = ["sandbox", *words]
    if words[:1] != ["sandbox"]:
        return words
    end = words.index("--") if "--" in words else len(words)
    return [_renamed(word) for word in words[:end]] + words[end:]


def _renamed(word: str) -> str:
    return "--context" + word[9:] if word == "--profile" or word.startswith("--profile=") else word
