"""A key that can approve decides in a person's place, so a person at a terminal makes it, or the operator said otherwise."""

import json
import re
import secrets

import pytest
from lab.daemon import Box, DaemonProcess, Failed
from lab.terminal import Atoll, Terminal


def make(atoll: Atoll, name: str, scopes: str) -> Terminal:
    return Terminal(atoll.argv("key", "create", name, "--scopes", scopes, "--json"), atoll.env)


def listed(daemon: DaemonProcess) -> dict[str, list[str]]:
    return {key["name"]: key["scopes"] for key in daemon.get("/v1/keys")["keys"]}


@pytest.mark.parametrize("scopes", ["approve", "use,approve", "admin"])
def test_k8e_D25_no_program_makes_itself_a_key_that_approves(atoll: Atoll, daemon: DaemonProcess, scopes: str) -> None:
    name = f"k-{secrets.token_hex(4)}"
    assert atoll.fails("sandbox", "api-key", "create", name, "--scopes", scopes)["error"] == "permission_denied"
    asked = {"name": name, "scopes": scopes.split(",")}
    for fields in (asked, {**asked, "answer": "000000"}):
        with pytest.raises(Failed) as caught:
            daemon.post("/v1/keys", fields)
        assert caught.value.code == "permission_denied"
    with pytest.raises(Failed) as caught:
        daemon.post("/v1/keys/challenge", asked)
    assert caught.value.code == "permission_denied"
    with pytest.raises(Failed) as caught:
        daemon.post("/v1/keys/import", {"text": json.dumps({name: "a" * 64}), "scopes": scopes.split(",")})
    assert caught.value.code == "permission_denied"
    assert name not in listed(daemon)
    assert daemon.post("/v1/keys", {"name": name})["scopes"] == ["use"], "a plain key needs nobody"


def test_a_person_types_what_the_terminal_shows(atoll: Atoll, daemon: DaemonProcess) -> None:
    name = f"k-{secrets.token_hex(4)}"
    screen = make(atoll, name, "approve")
    shown = screen.read_until(b"to confirm: ")
    assert name.encode() in shown and b"can approve in your place" in shown
    found = re.search(rb"Type (\d{6}) to confirm", shown)
    assert found is not None
    screen.type(found[1])
    assert b'"scopes":["approve"]' in screen.finish()
    assert listed(daemon)[name] == ["approve"]


def test_a_wrong_answer_and_another_key_than_was_shown_are_refused(atoll: Atoll, daemon: DaemonProcess) -> None:
    name = f"k-{secrets.token_hex(4)}"
    screen = make(atoll, name, "approve")
    found = re.search(rb"Type (\d{6}) to confirm", screen.read_until(b"to confirm: "))
    assert found is not None
    right = found[1].decode()
    with pytest.raises(Failed) as caught:  # the right number, from where nobody sits
        daemon.post("/v1/keys", {"name": name, "scopes": ["approve"], "answer": right})
    assert caught.value.code == "permission_denied"
    screen.type(b"999999" if right != "999999" else b"111111")
    assert b"not what was shown" in screen.finish()
    assert name not in listed(daemon)


def test_the_operator_can_do_without_a_terminal() -> None:
    daemon = DaemonProcess()
    (daemon.home / "config.toml").write_text("[security]\napprove_keys_without_terminal = true\n")
    daemon.start()
    try:
        assert daemon.post("/v1/keys", {"name": "boss", "scopes": ["approve"]})["scopes"] == ["approve"]
    finally:
        daemon.close()


def test_who_waits_for_an_approval_cannot_make_the_key_for_it(atoll: Atoll, box: Box) -> None:
    """The same terminal asks and then wants the key: refused, for the request may be a program's there."""
    script = (
        f'{" ".join(atoll.argv())} sandbox confirm sess-{box.id} "drop it" --no-wait; '
        f"{' '.join(atoll.argv())} key create boss-{secrets.token_hex(4)} --scopes approve --json"
    )
    seen = Terminal(["/bin/sh", "-c", script], atoll.env).finish()
    assert b"waits for an approval itself" in seen
