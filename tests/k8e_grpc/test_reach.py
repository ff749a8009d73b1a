"""What a session may reach, and how it is reached: host lists that change live, and exposed ports."""

import time
import urllib.error
import urllib.request

import pytest

from .test_rpcs import code

SERVER = "import http.server as h; h.HTTPServer(('127.0.0.1', 8123), h.SimpleHTTPRequestHandler).serve_forever()"


def test_k8e_D34_lists_are_replaced_live_and_an_empty_one_is_the_default(local, session) -> None:
    default = list(local.GetSession(session_id=session).allowed_hosts)
    assert len(default) == 5
    both = local.UpdateAllowedHosts(session_id=session, hosts=["a.example", "b.example"]).hosts
    assert sorted(both) == ["a.example", "b.example"]
    assert sorted(local.GetSession(session_id=session).allowed_hosts) == ["a.example", "b.example"]
    assert sorted(local.UpdateAllowedHosts(session_id=session).hosts) == sorted(default)
    for bad in (["http://x/"], ["a b"], [""], ["x" * 400], ["\0"]):
        assert code(local.UpdateAllowedHosts, session_id=session, hosts=bad) == "INVALID_ARGUMENT"


def test_k8e_P18_hosts_given_at_create(local) -> None:
    made = local.CreateSession(allowed_hosts=["github.com"], memory_mb=128).session_id
    try:
        assert list(local.GetSession(session_id=made).allowed_hosts) == ["github.com"]
    finally:
        local.DestroySession(session_id=made)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_k8e_D22_an_exposed_port_answers_at_a_url_nobody_guesses(local, session) -> None:
    local.WriteFile(session_id=session, path="/workspace/page.txt", content="from inside")
    local.Exec(session_id=session, argv=["python3", "-c", SERVER], background=True)
    url = local.ExposeService(session_id=session, port=8123).url
    assert local.ExposeService(session_id=session, port=8123).url == url
    listed = local.ListExposed(session_id=session).services
    assert [(one.port, one.url, one.host) for one in listed] == [(8123, url, "127.0.0.1")]
    assert listed[0].started_at > 0
    until = time.monotonic() + 60
    while (answer := get(f"{url.rstrip('/')}/page.txt"))[0] != 200:
        assert time.monotonic() < until, answer
        time.sleep(0.2)
    assert answer[1] == "from inside"
    assert session.removeprefix("sess-") not in url
    assert local.UnexposeService(session_id=session, port=8123).ok
    assert not local.UnexposeService(session_id=session, port=8123).ok
    assert get(f"{url.rstrip('/')}/page.txt")[0] >= 400
    assert not local.ListExposed(session_id=session).services


@pytest.mark.parametrize("host", ["example.com", "not an address", "1.2.3"])
def test_only_addresses_can_be_exposed(local, session, host) -> None:
    assert code(local.ExposeService, session_id=session, port=80, host=host) in (
        "INVALID_ARGUMENT",
        "PERMISSION_DENIED",
    )
