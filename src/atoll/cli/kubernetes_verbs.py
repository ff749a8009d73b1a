"""The verbs for who sets up a cluster, for the one table in `cli/verbs.py`."""

from __future__ import annotations

from .grammar import Flag, Verb

AS_JSON = Flag("json", "", "one JSON object instead of text")

VERBS = (
    Verb(
        "kubernetes install", "kubernetes:install", "VALUES...",
        "Install the chart with helm: pools as in these files, and this gateway's key, which is made if there is none.",
        (
            Flag("agent-image", "IMAGE", "the image that brings the agent"),
            Flag("print", "", "only print the objects"),
        ),
        ("atoll kubernetes install my-values.yaml", "atoll kubernetes install my-values.yaml --print | kubectl diff -f -"),
    ),
    Verb("kubernetes status", "kubernetes:status", "", "Pools and sandboxes in the namespace of the gateway.", (AS_JSON,)),
    Verb(
        "kubernetes doctor", "kubernetes:doctor", "",
        "What keeps the cluster from being used, and how each thing is mended.", (AS_JSON,),
    ),
)  # fmt: skip
