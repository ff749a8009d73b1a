"""Verbs about connections and keys in K8E's grammar, and the flags every verb has, for the one table in `cli/verbs.py`."""

from __future__ import annotations

from atoll.cli.agents_verbs import SKILL

from .grammar import Flag, Verb

SHARED = (
    Flag("endpoint", "ADDRESS", "the gateway to use, host:port, or unix:/path of a local daemon's socket"),
    Flag("apikey", "KEY", "the API key for it; better in ATOLL_APIKEY, which process lists do not show"),
    Flag("context", "NAME", "the connection profile to use (`--profile` when called k8e)"),
    Flag("debug", "", "show where an internal error came from"),
    Flag("json", "", "JSON, also at a terminal and from verbs that print text"),
    Flag("help", "", "show help", short="h"),
)
AS_JSON = Flag("json", "", "JSON also on a terminal")
GRPC = Flag("grpc", "ADDRESS", "listen there; may be repeated, `none` for no TCP (default: as configured, 127.0.0.1:50051)",
            repeat=True)  # fmt: skip

_CREATE = (
    Flag("ttl", "TIME", "how long it is valid: 30d, 720h, days, or never (default: 30d)", default="30d"),
    Flag("scopes", "CSV", "use, approve, admin (default: use)", kind="csv"),
    Flag(
        "quota",
        "NAME=N",
        "sandboxes, cpus, memory_mb, disk_mb, write_rate, ...; may be repeated",
        kind="pair",
        repeat=True,
    ),
    AS_JSON,
)
_MADE = "Make an API key; it is shown this once."
_NAMED = "End a key, and every certificate issued for it, at once."

VERBS = (
    Verb("key create", "keys:create", "NAME", _MADE, _CREATE, ("atoll key create ci --ttl 7d --quota sandboxes=4",)),
    Verb("key list", "keys:list_all", "", "API keys, without the keys themselves.", (AS_JSON,)),
    Verb("key revoke", "keys:revoke", "NAME", _NAMED, (AS_JSON,)),
    Verb("key import", "keys:bring_in", "FILE", "Take over K8E's keys.json; - is standard input.", (AS_JSON,)),
    Verb("sandbox api-key create", "keys:create", "NAME", _MADE, _CREATE),
    Verb("sandbox api-key list", "keys:list_all", "", "API keys, without the keys themselves.", (AS_JSON,)),
    Verb("sandbox api-key delete", "keys:revoke", "NAME", _NAMED, (AS_JSON,)),
    Verb(
        "sandbox connect", "atoll.surfaces.k8e.cli.connect:connect", "", "Set this machine up for a gateway, or for the local daemon.",
        (
            Flag("agent", "TARGET", "whom to teach: auto, all, or one of `help skill install` (default: auto)", default="auto"),
            Flag("skip-skill", "", "install no skill"),
            Flag("skill-only", "", "only install the skill"),
            Flag("skip-verify", "", "do not call the gateway; its certificate is checked whenever it is called"),
            Flag("skip-path", "", "make no link in ~/.local/bin"),
            Flag("reset-certs", "", "first remove the certificates there are"),
        ),
        ("ATOLL_APIKEY=... atoll sandbox connect --endpoint 10.0.0.1:50051", "atoll sandbox connect --reset-certs"),
    ),
    Verb(
        "sandbox login", "atoll.surfaces.k8e.cli.connect:login", "", "A client certificate from a gateway, in exchange for a key.",
        (Flag("device-name", "NAME", "what to call this machine there (default: its host name)"),),
        ("K8E_SANDBOX_CERT=ca.crt ATOLL_APIKEY=... atoll sandbox login --endpoint 10.0.0.1:50051",),
    ),
    Verb(
        "sandbox doctor", "doctor:sandbox_doctor", "", "What works, what does not, and how to fix it.",
        (AS_JSON, Flag("fix", "", "repair what can be repaired from here: the skill files")),
    ),
    Verb(
        "sandbox benchmark", "benchmark:benchmark", "", "How long sandboxes take here, in milliseconds.",
        (
            Flag("pool-size", "N", "sandboxes alive at once (default: 3)", kind="int", default=3),
            Flag("iterations", "N", "how often each is measured (default: 3)", kind="int", default=3),
        ),
    ),
    Verb(
        "sandbox install-skill", "skill:install_k8e", "[TARGET]", "The same as `sandbox-install-skill`.",
        SKILL,
    ),
)  # fmt: skip
ALIASES = {"sandbox-apikey": "sandbox api-key", "sandbox-gateway": "serve"}
