"""Confirm and approve over gRPC: who may, once, and what the one who waits is told."""

import secrets
import threading

import grpc
import pytest

from .test_rpcs import code


@pytest.fixture
def people(gateway):
    """An agent with a plain key, and a boss who may approve and nothing else."""
    mark = secrets.token_hex(4)
    agent = gateway.stub(gateway.key(f"agent-{mark}").secret)
    boss = gateway.stub(gateway.key(f"boss-{mark}", scopes=["approve"]).secret)
    session = agent.CreateSession(memory_mb=128).session_id
    yield agent, boss, session
    agent.DestroySession(session_id=session)


@pytest.mark.parametrize("approved", [True, False], ids=["yes", "no"])
def test_k8e_P25_confirm_blocks_until_somebody_else_decides(people, approved) -> None:
    agent, boss, session = people
    asked = agent.ConfirmAction(session_id=session, action="rm -rf /data")
    assert asked.approval_id.startswith("approval-") and not asked.approved
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(agent.ConfirmAction(approval_id=asked.approval_id)))
    waiting.start()
    assert boss.ApproveAction(approval_id=asked.approval_id, approved=approved, reason="because").ok
    waiting.join(60)
    assert (answers[0].approved, answers[0].reason) == (approved, "because")


def test_k8e_D25_nobody_approves_their_own_and_twice_is_an_error(gateway, people) -> None:
    agent, boss, session = people
    asked = agent.ConfirmAction(session_id=session, action="deploy").approval_id
    assert code(agent.ApproveAction, approval_id=asked, approved=True) == "PERMISSION_DENIED"
    assert boss.ApproveAction(approval_id=asked, approved=True).ok
    assert code(boss.ApproveAction, approval_id=asked, approved=False) == "FAILED_PRECONDITION"
    both = gateway.stub(gateway.key(f"both-{secrets.token_hex(4)}", scopes=["use", "approve"]).secret)
    mine = both.CreateSession(memory_mb=128).session_id
    own = both.ConfirmAction(session_id=mine, action="deploy").approval_id
    assert code(both.ApproveAction, approval_id=own, approved=True) == "PERMISSION_DENIED"
    both.DestroySession(session_id=mine)


def test_a_program_of_the_local_user_cannot_approve(local, people) -> None:
    agent, _, session = people
    asked = agent.ConfirmAction(session_id=session, action="deploy").approval_id
    assert code(local.ApproveAction, approval_id=asked, approved=True) in ("PERMISSION_DENIED", "NOT_FOUND")


def test_an_approver_can_do_nothing_else(people) -> None:
    _, boss, session = people
    assert code(boss.Exec, session_id=session, command="true") == "PERMISSION_DENIED"
    assert code(boss.ListSessions) == "PERMISSION_DENIED"


def test_approvals_survive_a_restart(gateway, people) -> None:
    agent, boss, session = people
    asked = agent.ConfirmAction(session_id=session, action="deploy").approval_id
    gateway.restart()
    assert boss.ApproveAction(approval_id=asked, approved=True).ok
    assert agent.ConfirmAction(approval_id=asked).approved


def test_bad_input(people, gateway) -> None:
    agent, boss, session = people
    for fields in (
        {},
        {"session_id": session},
        {"session_id": session, "action": " "},
        {"session_id": session, "action": "x" * 5000},
    ):
        assert code(agent.ConfirmAction, **fields) == "INVALID_ARGUMENT"
    assert code(agent.ConfirmAction, session_id="no-such", action="x") == "NOT_FOUND"
    assert code(agent.ConfirmAction, approval_id="approval-x") == "NOT_FOUND"
    assert code(boss.ApproveAction, approval_id="approval-x", approved=True) == "NOT_FOUND"
    assert code(boss.ApproveAction, approved=True) == "INVALID_ARGUMENT"
    other = gateway.stub(gateway.key(f"other-{secrets.token_hex(4)}").secret)
    asked = agent.ConfirmAction(session_id=session, action="x").approval_id
    assert code(other.ConfirmAction, approval_id=asked) == "NOT_FOUND"


def test_a_caller_that_leaves_takes_its_request_back(people) -> None:
    agent, boss, session = people
    asked = agent.ConfirmAction(session_id=session, action="x").approval_id
    with pytest.raises(grpc.RpcError) as caught:
        agent.ConfirmAction(approval_id=asked, deadline=1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert code(boss.ApproveAction, approval_id=asked, approved=True) == "FAILED_PRECONDITION"
