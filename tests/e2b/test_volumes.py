"""Volumes by the stock SDK, and through its sandboxes."""

import os
from typing import Any

import e2b
from lab.e2b import Door, new_key


def test_a_volume_is_made_mounted_shared_and_removed(door: Door) -> None:
    name = f"v-{os.urandom(4).hex()}"
    made = e2b.Volume.create(name, **door.options)
    boxes: list[Any] = []
    try:
        assert made.name == name and [one.name for one in e2b.Volume.list(**door.options)] == [name]
        assert e2b.Volume.connect(made.volume_id, **door.options).name == name
        for _ in range(2):
            boxes.append(e2b.Sandbox.create(timeout=300, volume_mounts={"/mnt/v": name}, **door.options))
        boxes[0].commands.run("echo shared > /mnt/v/f")
        assert boxes[1].files.read("/mnt/v/f") == "shared\n"
        assert door.ask("DELETE", f"/volumes/{made.volume_id}")[0] == 409
        other = Door(door.lab, door.port, new_key(door.lab), door.runtime)
        assert other.ask("GET", f"/volumes/{made.volume_id}")[0] == 404
        body = {"templateID": "base", "volumeMounts": [{"name": name, "path": "/mnt/v"}]}
        assert other.ask("POST", "/v2/sandboxes", body)[0] == 404
    finally:
        for box in boxes:
            box.kill()
    assert e2b.Volume.destroy(made.volume_id, **door.options)
    assert not e2b.Volume.destroy(made.volume_id, **door.options)


def test_bodies_that_name_no_volume_are_refused(door: Door) -> None:
    for body in ({}, {"name": ""}, {"name": None}, {"name": "a/b"}, {"name": 1}, []):
        assert door.ask("POST", "/volumes", body)[0] == 400
    for mounts in ([{"name": "no-such", "path": "/x"}], [{"name": "x"}], ["x"], [{"name": "x", "path": "relative"}]):
        status, told, _ = door.ask("POST", "/v2/sandboxes", {"templateID": "base", "volumeMounts": mounts})
        assert status in (400, 404) and told["code"] == status
