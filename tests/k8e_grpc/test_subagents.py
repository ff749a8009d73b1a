"""Sub-agents over gRPC: a session of their own on the parent's workspace."""

import threading

import pytest

from .test_rpcs import code


@pytest.fixture
def family(local, session):
    local.WriteFile(session_id=session, path="/workspace/task", content="from the parent")
    children = [local.RunSubAgent(parent_session_id=session).session_id for _ in range(2)]
    yield session, children


def test_k8e_P24_two_sub_agents_work_on_the_parents_files(local, family) -> None:
    parent, children = family
    assert len({parent, *children}) == 3
    assert all(child.startswith(f"{parent}-sub-") for child in children)
    outputs: dict[str, str] = {}

    def work(child: str) -> None:
        stream = local.ExecStream(
            session_id=child, command="cat /workspace/task; echo done > /workspace/$NAME", env={"NAME": child[-6:]}
        )
        outputs[child] = "".join(message.chunk for message in stream)

    threads = [threading.Thread(target=work, args=(child,)) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert outputs == dict.fromkeys(children, "from the parent")
    names = {f.path for f in local.ListFiles(session_id=parent).files}
    assert {f"/workspace/{child[-6:]}" for child in children} < names


def test_k8e_D30_commands_run_in_sub_agents_and_deeper_is_refused(local, family) -> None:
    _, (child, other) = family
    assert local.Exec(session_id=child, command="echo alive; exit 3").exit_code == 3
    assert code(local.RunSubAgent, parent_session_id=child) == "PERMISSION_DENIED"
    assert local.GetSession(session_id=child).session_id == child
    local.Exec(session_id=child, command="echo mine > /tmp/private")
    assert code(local.ReadFile, session_id=other, path="/tmp/private") == "NOT_FOUND"


def test_sub_agents_end_with_their_parent(local, family) -> None:
    parent, children = family
    local.DestroySession(session_id=parent)
    for child in children:
        assert code(local.Exec, session_id=child, command="true") == "NOT_FOUND"


def test_bad_parents(local) -> None:
    assert code(local.RunSubAgent) == "INVALID_ARGUMENT"
    assert code(local.RunSubAgent, parent_session_id="no-such") == "NOT_FOUND"
