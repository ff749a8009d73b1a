"""Templates by the stock SDK: builds, uploads, tags, start commands, and what goes wrong."""

import os
from pathlib import Path
from typing import Any

import e2b
import pytest
from lab.e2b import Door, new_key


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/main.py").write_text("print('from the template')\n")
    (tmp_path / "it's $HOME").write_text("odd\n")
    return tmp_path


def name() -> str:
    return f"t-{os.urandom(5).hex()}"


def made(door: Door, template: str) -> Any:
    return e2b.Sandbox.create(template, timeout=300, **door.options)


def test_a_template_is_built_tagged_used_and_removed(door: Door, project: Path) -> None:
    told: list[str] = []
    options = {key: value for key, value in door.options.items() if key != "sandbox_url"}
    template = (
        e2b.Template(file_context_path=str(project))
        .from_base_image()
        .copy("app", "/home/user/app")
        .copy("it's $HOME", "odd/", mode=0o600)
        .set_envs({"COLOUR": "a $b 'c'"})
        .run_cmd('echo "$COLOUR" > colour; whoami > who; pwd >> who')
        .run_cmd("echo root > /etc/by-root", user="root")
        .set_workdir("/home/user/app")
        .set_start_cmd(
            "python3 -m http.server 8765", "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8765))'"
        )
    )
    wanted = name()
    info = e2b.Template.build(
        template, wanted, tags=["v1", "default"], cpu_count=1, memory_mb=256,
        on_build_logs=lambda line: told.append(line.message), **options,
    )  # fmt: skip
    assert info.template_id and any("COLOUR" in line for line in told)
    assert e2b.Template.exists(wanted, **options) and not e2b.Template.exists(name(), **options)
    assert {one.tag for one in e2b.Template.get_tags(wanted, **options)} == {"v1", "default"}
    e2b.Template.assign_tags(f"{wanted}:v1", "v2", **options)
    e2b.Template.remove_tags(wanted, "v1", **options)
    assert {one.tag for one in e2b.Template.get_tags(wanted, **options)} == {"v2", "default"}
    box = made(door, f"{wanted}:v2")
    try:
        run = box.commands.run
        assert run("python3 app/main.py").stdout == "from the template\n"
        assert run("cat colour who /etc/by-root").stdout == "a $b 'c'\nuser\n/home/user\nroot\n"
        assert run("cat \"odd/it's \\$HOME\"; stat -c '%U %a' odd/*").stdout == "odd\nuser 600\n"
        assert (
            "main.py"
            in run("python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8765').read())\"").stdout
        )
    finally:
        box.kill()
    again = e2b.Template.build(template, wanted, **options)
    assert again.template_id == info.template_id
    other = Door(door.lab, door.port, new_key(door.lab), door.runtime)
    assert other.ask("GET", f"/templates/{info.template_id}")[0] == 404
    with pytest.raises(e2b.SandboxException, match="404"):
        made(other, wanted)
    assert door.ask("DELETE", f"/templates/{info.template_id}")[0] == 204
    assert not e2b.Template.exists(wanted, **options)


def test_a_step_that_fails_is_told_with_its_number(door: Door) -> None:
    template = e2b.Template().from_template("base").run_cmd("true").run_cmd("echo why; exit 4")
    with pytest.raises(e2b.BuildException, match="the step ended with 4\nwhy"):
        e2b.Template.build(template, name(), **door.options)
    status, begun, _ = door.ask("POST", "/v3/templates", {"name": name()})
    assert status == 202
    place = f"/templates/{begun['templateID']}/builds/{begun['buildID']}"
    steps = [{"type": "RUN", "args": ["true"]}, {"type": "RUN", "args": ["exit 4"]}]
    assert door.ask("POST", f"/v2{place}", {"fromTemplate": "base", "steps": steps})[0] == 202
    state: dict[str, Any] = {"status": "building"}
    while state["status"] in ("waiting", "building"):
        state = door.ask("GET", f"{place}/status?logsOffset=0")[1]
    assert state["status"] == "error" and state["reason"]["step"] == "2"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"steps": [{"type": "ADD", "args": ["x"]}]}, 400),
        ({"steps": [{"type": "COPY", "args": ["../x", "/"]}]}, 400),
        ({"steps": [{"type": "COPY", "args": ["x", "/"], "filesHash": "0" * 64}]}, 404),
        ({"steps": [{"type": "ENV", "args": ["x"]}]}, 400),
        ({"fromImageRegistry": {"type": "registry", "username": "a", "password": "b"}, "steps": []}, 400),
        ({"steps": None}, 400),
        ({"steps": [{"type": "RUN", "args": [1]}]}, 400),
    ],
)
def test_orders_that_cannot_be_built_are_refused(door: Door, body: Any, code: int) -> None:
    begun = door.ask("POST", "/v3/templates", {"name": name()})[1]
    status, told, _ = door.ask("POST", f"/v2/templates/{begun['templateID']}/builds/{begun['buildID']}", body)
    assert status == code and told["code"] == code and told["message"]


def test_an_upload_needs_its_token(door: Door) -> None:
    begun = door.ask("POST", "/v3/templates", {"name": name()})[1]
    status, link, _ = door.ask("GET", f"/templates/{begun['templateID']}/files/{'a' * 64}")
    assert status == 201 and link["present"] is False
    path = link["url"].split("/", 3)[3]
    owner, _, token = path.removeprefix("uploads/").split("/")
    assert door.ask("PUT", f"/uploads/{owner}/{'b' * 64}/{token}", b"x", key="")[0] == 403
    assert door.ask("PUT", f"/{path}", b"x", key="")[0] == 200
    assert door.ask("GET", f"/templates/{begun['templateID']}/files/{'a' * 64}")[1]["present"] is True
