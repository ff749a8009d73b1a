"""Words of a command, environments, ids, modes and URLs: the vectors of the contract, without a sandbox."""

import json
from pathlib import Path

import pytest

from atoll import errors
from atoll.egress import HOST_NAME as GW
from atoll.surfaces.iii import requests as r
from atoll.surfaces.iii import settings as config
from atoll.surfaces.iii.failure import CODES, Failure
from atoll.surfaces.iii.table import FUNCTIONS, schemas
from atoll.surfaces.iii.words import command, point_at_gateway

IDS = ["run", "create", "exec", "stop", "list", "catalog::list"] + [
    f"fs::{name}" for name in ("write", "read", "ls", "stat", "mkdir", "rm", "mv", "chmod", "grep", "sed")
]


def test_iii_Q1_the_sixteen_ids_are_exact() -> None:
    """Name exactly the functions of the document."""
    assert sorted(FUNCTIONS) == sorted(f"sandbox::{name}" for name in IDS)
    assert len(FUNCTIONS) == 16


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_iii_Q3_each_function_has_schemas(name: str) -> None:
    """Describe request and answer of every function in JSON Schema that stands by itself."""
    import jsonschema

    for one in schemas(name):
        jsonschema.Draft202012Validator.check_schema(one)
        assert "$ref" not in one or "$defs" in one
    if name == "sandbox::exec":
        jsonschema.validate({"sandbox_id": "x", "env": {"A": "1"}}, schemas(name)[0])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"env": {"A": "1"}}, schemas(name)[0])


@pytest.mark.parametrize(
    ("cmd", "argv"),
    [
        ("python3 -c 'print(1)'", ["python3", "-c", "print(1)"]),
        ("echo a && b", ["echo", "a", "&&", "b"]),
        ("echo $HOME", ["echo", "$HOME"]),
        ("echo a #b", ["echo", "a"]),
        ("echo a#b", ["echo", "a#b"]),
        ('echo "a \\"b\\" \\n"', ["echo", 'a "b" \\n']),
        ("echo a\\ b ''", ["echo", "a b", ""]),
        ("echo 'a'\"b\"c", ["echo", "abc"]),
        ("echo x > /tmp/y | z", ["echo", "x", ">", "/tmp/y", "|", "z"]),
        ("echo a # b\nc", ["echo", "a", "c"]),
        ("ls", ["ls"]),
    ],
)
def test_iii_Q9_cmd_is_split_and_nothing_is_expanded(cmd: str, argv: list[str]) -> None:
    """Split a command into POSIX words and expand nothing."""
    assert command(cmd, [], []) == argv


@pytest.mark.parametrize(
    ("cmd", "args", "argv"),
    [
        ("a b", ["c"], []),
        ("a", [], ["b"]),
        ("", ["c"], ["b"]),
        ("echo 'x", [], []),
        ('echo "x', [], []),
        ("echo \\", [], []),
        ("   ", [], []),
        ("", [], []),
        ("", ["a"], []),
        ("", [], ["", "a"]),
        ("# only", [], []),
        ("a\0b", [], []),
    ],
)
def test_iii_exec_bad_shapes_are_S001(cmd: str, args: list[str], argv: list[str]) -> None:
    """Refuse what is no command."""
    with pytest.raises(Failure) as refused:
        command(cmd, args, argv)
    assert refused.value.code == "S001"


def test_iii_Q20_both_forms_of_env() -> None:
    """Read an environment from an array and from an object."""
    assert r.environment(["A=1=2", "B="]) == {"A": "1=2", "B": ""}
    assert r.environment({"A": "x"}) == {"A": "x"}
    assert r.environment([]) == {}


@pytest.mark.parametrize("env", [{"1A": "x"}, {"A": 1}, ["A"], ["=x"], "A=1", {"A": None}, [1], {"A": "\0"}])
def test_iii_Q20_bad_env_is_S001(env: object) -> None:
    """Refuse an environment that is none."""
    with pytest.raises(Failure) as refused:
        r.decode(r.Create, {"image": "python", "env": env}, "")
    assert refused.value.code == "S001"


def test_iii_Q20_all_bad_keys_are_named() -> None:
    """Name every bad key at once."""
    with pytest.raises(Failure) as refused:
        r.environment({"1A": "x", "ok": "y", "2B": "z"})
    assert "1A" in refused.value.message and "2B" in refused.value.message and "ok" not in refused.value.message


@pytest.mark.parametrize(
    ("value", "rewritten", "ports"),
    [
        ("http://localhost:3000/x", f"http://{GW}:3000/x", [3000]),
        ("ws://127.0.0.1:49134", f"ws://{GW}:49134", [49134]),
        ("redis://:pw@localhost:6379/0", f"redis://:pw@{GW}:6379/0", [6379]),
        ("http://localhost/health", f"http://{GW}/health", [80]),
        ("http://localhost", f"http://{GW}", [80]),
        ("http://localhost?x=1", f"http://{GW}?x=1", [80]),
        ("http://u:p@127.0.0.1/x", f"http://u:p@{GW}/x", [80]),
    ],
)
def test_iii_Q22_local_urls_point_at_the_gateway(value: str, rewritten: str, ports: list[int]) -> None:
    """Point URLs of this machine at the gateway, and open just the ports they name."""
    assert point_at_gateway({"V": value}, ports) == ({"V": rewritten}, ports)
    assert point_at_gateway({"V": value}, []) == ({"V": value}, []), "the operator opened none"


@pytest.mark.parametrize(
    "value",
    [
        "localhost:5432",
        "http://0.0.0.0:1",
        "http://[::1]:1",
        "http://127.0.0.10:1",
        "http://localhost.example.com",
        "http://localhost:80@example.com/",
        "http://localhost@example.com/",
        "http://localhost:99999/",
        "http://notlocalhost/",
        "http://localhost:2375/ and then http://localhost:7777/",
        "see http://localhost:7777/",
        "a=http://localhost:1,b=http://127.0.0.1:2",
        "http://localhost:1/\nhttp://localhost:2/",
    ],
)
def test_iii_Q22_other_values_stay(value: str) -> None:
    """Leave everything else as it is, and open nothing."""
    assert point_at_gateway({"V": value}, range(65536)) == ({"V": value}, [])


def test_iii_ids_in_every_form() -> None:
    """Read a UUID in all its forms, and answer in one."""
    plain = "6ba7b810-9dad-4ed1-80b4-00c04fd430c8"
    for text in (plain, plain.upper(), plain.replace("-", ""), f"{{{plain}}}", f"urn:uuid:{plain}"):
        assert r.sandbox_id(text) == plain
    for text in ("", "x", plain[:-1], plain + "0", plain + "\n", "{" + plain):
        with pytest.raises(Failure, match="S001"):
            r.sandbox_id(text)


def test_iii_modes_are_octal_text() -> None:
    """Read octal text with or without zeros before it."""
    assert [r.octal(text) for text in ("644", "0644", "00755", "4755")] == [0o644, 0o644, 0o755, 0o4755]
    for text in ("", "9", "0o644", "77777", "-1", "rwx"):
        with pytest.raises(Failure, match="S210"):
            r.octal(text)


@pytest.mark.parametrize("code", sorted(CODES))
def test_iii_Q21_every_code_has_its_envelope(code: str) -> None:
    """Make an envelope that parses, with a type and whether to retry."""
    envelope = json.loads(str(Failure(code, "a\udc80b")))
    assert envelope["code"] == code and envelope["docs_url"].endswith(f"#{code}")
    assert envelope["retryable"] is (code in ("S102", "S218"))
    assert envelope["type"] in ("validation", "config", "internal", "transient", "execution", "filesystem", "platform")


@pytest.mark.parametrize(
    "payload",
    [{}, {"image": None}, {"image": 1}, {"image": "p", "cpus": 0}, {"image": "p", "cpus": 256}, {"image": "p", "cpus": 1.5},
     {"image": "p", "memory_mb": 31}, {"image": "p", "network": "yes"}, {"image": "p", "idle_timeout_secs": -1}, [], "x", 3],
)  # fmt: skip
def test_iii_D14_undecodable_requests_are_S001(payload: object) -> None:
    """Name what is wrong with a request that cannot be read."""
    with pytest.raises(Failure) as refused:
        r.decode(r.Create, payload, "example")
    assert refused.value.code == "S001" and refused.value.note == "example"


def test_iii_null_is_absence_where_the_contract_says_so() -> None:
    """Take null for absence in the fields that allow it, and ignore unknown ones."""
    fields = dict.fromkeys(("cpus", "memory_mb", "name", "network", "idle_timeout_secs"))
    assert r.decode(r.Create, {"image": "p", **fields, "unheard_of": 1}, "").cpus is None
    assert r.decode(r.Exec, {"sandbox_id": "x", "timeoutMs": 5}, "").timeout_ms == 5


# Settings


def test_iii_Q4_an_entry_of_config_yaml(tmp_path: Path) -> None:
    """Find the iii-sandbox entry in an engine's file, or read the map alone; the generated block is one."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "port: 49134\nworkers:\n  - name: iii-http\n  - name: iii-sandbox\n    config:\n      default_cpus: 2\n"
    )
    settings, warnings = config.read(file)
    assert settings.default_cpus == 2 and settings.image_allowlist == [] and warnings == []
    file.write_text("image_allowlist: [python]\nfuture: 1\n")
    settings, warnings = config.read(file)
    assert settings.allowed() == ["python"] and len(warnings) == 1 and "future" in warnings[0]
    file.write_text(config.NEW_BLOCK)
    assert config.read(file)[0].allowed() == ["python", "node"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sandbox:\n  default_cpus: 1\n", "sandbox"),
        ("default_cpus: many\n", "default_cpus"),
        ("custom_images: {python: docker.io/x/y}\n", "python"),
        ("custom_images: {'': docker.io/x/y}\n", "custom_images"),
        ("isolation: chroot\n", "isolation"),
        ("image_allowlist: python\n", "image_allowlist"),
        ("a: [\n", "YAML"),
        ("workers: []\n", "iii-sandbox"),
    ],
)
def test_iii_config_mistakes_name_the_key(tmp_path: Path, text: str, named: str) -> None:
    """Refuse a file with a mistake, and say where it is."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(errors.InvalidArgument) as refused:
        config.read(file)
    assert named in refused.value.message


def test_iii_Q16_no_file_allows_the_presets_and_an_empty_list_nothing() -> None:
    """Allow presets without a file; deny all with an empty or absent list in one."""
    assert config.Settings().allowed() == ["python", "node"]
    assert config.parse({"image_allowlist": []})[0].allowed() == []
    assert config.parse({})[0].allowed() == []
    assert config.parse({"image_allowlist": ["unknown"]})[0].allowed() == []
