"""EGR-05: the decision is by (name, port) in canonical form, equals an independent model, and is no before a policy."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.egress import EgressPolicy
from atoll.egress.presets import git_hosts, never_hosts, not_public_suffixes

LABELS = ["a", "b", "xn--bcher-kva", "github", "example", "com", "org", "internal", "local", "evil", "A", "x1"]
NAMES = st.lists(st.sampled_from(LABELS), min_size=1, max_size=4).map(".".join)
PORTS = st.sampled_from([1, 22, 80, 443, 444, 8443, 65535])


def rule_text(parts: tuple[str, str, int | None]) -> str:
    kind, name, port = parts
    text = {"exact": name, "suffix": f"*.{name}.com", "any": "*"}[kind]
    return text if port is None else f"{text}:{port}"


RULES = st.lists(
    st.tuples(st.sampled_from(["exact", "suffix", "any"]), NAMES, st.none() | PORTS).map(rule_text), max_size=5
)


def model(rules: list[str], name: str, port: int) -> bool:
    """The policy in the plainest words."""
    name = name.lower()
    if name in never_hosts():
        return False
    for rule in rules:
        pattern, _, wanted = rule.lower().partition(":")
        if pattern == "*":
            last = name.split(".")[-1]
            matches = "." in name and last not in not_public_suffixes()
            ports = set(range(1, 65536))
        elif pattern.startswith("*."):
            matches, ports = name.endswith(pattern[1:]), {80, 443}
        else:
            matches, ports = name == pattern, {80, 443}
        if name in git_hosts() and pattern != "*":
            ports.add(22)
        if matches and port in ({int(wanted)} if wanted else ports):
            return True
    return False


@settings(max_examples=300, deadline=None, database=None)
@given(RULES, NAMES, PORTS)
def test_decision_equals_the_model(rules: list[str], name: str, port: int) -> None:
    """Agree with the model for every list, name and port; resolve only what some port is open for."""
    policy = EgressPolicy.of(rules)
    assert policy.decide(name, port).allowed == model(rules, name, port)
    ports = policy.ports(name.lower())
    if policy.decide(name, port).allowed:
        assert policy.decide(name).allowed
        assert ports is None or port in ports
    shuffled = random.Random(1).sample(rules, len(rules))
    assert EgressPolicy.of(shuffled).decide(name, port).allowed == policy.decide(name, port).allowed
    assert EgressPolicy.from_dict(policy.to_dict()) == policy


@settings(max_examples=300, deadline=None, database=None)
@given(RULES, st.text(max_size=40), st.integers(-1, 70000))
def test_decision_never_fails(rules: list[str], name: str, port: int) -> None:
    """Give a verdict for any text and any number."""
    assert EgressPolicy.of(rules).decide(name, port).allowed in (True, False)
