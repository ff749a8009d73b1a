"""The tables of profiles and modes, the merge rule, and what a file found in a project may not do."""

from pathlib import Path

import pytest

from atoll import errors, profiles
from atoll.cli.grammar import Arguments, UsageError
from atoll.core.access.credentials import KeyHolder
from atoll.core.access.principals import local
from atoll.core.policy.profiles import OPEN, Ceiling, ceiling_of, resolve
from atoll.egress import presets
from atoll.model import CreateSandbox
from atoll.surfaces.agentkernel.cli import policy, project


def flags(**values: object) -> Arguments:
    every = {"compatibility_mode": None, "profile": None, "no_network": None, "allowed_hosts": None}
    return Arguments([], {**every, **values})


def found(directory: Path, text: str, name: str = "agentkernel.toml") -> project.Project:
    (directory / name).write_text(text)
    made = project.find(None, str(directory))
    assert made is not None and made.found
    return made


def named(directory: Path, text: str) -> project.Project:
    (directory / "named.toml").write_text(text)
    made = project.find(str(directory / "named.toml"), str(directory))
    assert made is not None and not made.found
    return made


def test_ak_P8_P9_P10_the_three_profiles() -> None:
    moderate = profiles.merge()
    assert (moderate.network, moderate.mount_cwd, moderate.mount_home, moderate.pass_env) == (True, False, False, False)
    assert (moderate.read_only, moderate.memory_mb, moderate.cpus, moderate.seccomp) == (False, 512, 1.0, "moderate")
    strict = profiles.merge(profile="restrictive")
    assert (strict.network, strict.mount_cwd, strict.read_only, strict.capabilities) == (False, False, True, "none")
    assert (strict.memory_mb, strict.cpus, strict.seccomp) == (256, 0.5, "restrictive")
    wide = profiles.merge(profile="permissive")
    assert (wide.network, wide.mount_cwd, wide.mount_home, wide.pass_env) == (True, True, True, True)
    assert (wide.read_only, wide.memory_mb, wide.cpus, wide.seccomp) == (False, None, None, "default")


def test_ak_P16_P17_the_modes() -> None:
    native, claude, codex, gemini = (profiles.merge(mode=mode) for mode in profiles.MODES)
    assert not native.mount_cwd and native.network and native.profile == "moderate"
    assert claude.mount_cwd and claude.network and not claude.read_only and claude.seccomp == "ai-agent"
    assert claude.env == {"CLAUDE_CODE_SANDBOX": "agentkernel"}
    assert codex.mount_cwd and codex.network and codex.read_only and codex.memory_mb == 256
    assert gemini.mount_cwd and gemini.network and not gemini.read_only
    assert presets.mode("native") == ("*",)
    assert {"api.anthropic.com", "cdn.anthropic.com", "pypi.org"} <= set(presets.mode("claude"))
    assert {"api.openai.com", "cdn.openai.com", "pypi.org"} <= set(presets.mode("codex"))
    assert {"*.googleapis.com", "pypi.org"} <= set(presets.mode("gemini"))
    assert "*" not in {*presets.mode("claude"), *presets.mode("codex"), *presets.mode("gemini")}


def test_ak_P15_profile_beside_a_mode() -> None:
    stays = profiles.merge(mode="claude", profile="moderate")
    assert stays.mount_cwd and stays.network
    gone = profiles.merge(mode="claude", profile="restrictive")
    assert not gone.mount_cwd and not gone.network and gone.read_only
    assert profiles.merge(mode="codex", profile="moderate").read_only is False
    assert profiles.merge(profile="custom", keys={"read_only": True}).read_only


def test_ak_K5_nothing_undoes_no_network() -> None:
    for mode in (None, *profiles.MODES):
        for profile in (None, *profiles.PROFILES, "custom"):
            assert not profiles.merge(mode=mode, profile=profile, keys={"network": True}, no_network=True).network


@pytest.mark.parametrize(
    ("read", "word", "hint"),
    [
        (profiles.profile_name, "moderat", "moderate"),
        (profiles.mode_name, "clade", "claude"),
        (profiles.seccomp_name, "restrictiv", "restrictive"),
        (profiles.seccomp_name, "./mine.json", "no filter from a file"),
    ],
)
def test_unknown_names_get_the_nearest(read: object, word: str, hint: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        read(word)  # type: ignore[operator]
    assert hint in caught.value.hint


def test_core_fills_in_what_a_profile_implies() -> None:
    spec, shown = resolve(CreateSandbox(profile="restrictive"))
    assert (spec.network, spec.read_only_root, spec.limits.memory_mb, spec.limits.cpus) == (False, True, 256, 0.5)
    assert shown["capabilities"] == "none" and shown["seccomp"] == "restrictive"
    assert resolve(spec)[0] == spec  # a stopped sandbox starts with what it was made with
    plain, _ = resolve(CreateSandbox())
    assert plain == CreateSandbox()
    claude, _ = resolve(CreateSandbox(mode="claude-code", env={"A": "1"}))
    assert claude.mode == "claude" and claude.env == {"CLAUDE_CODE_SANDBOX": "agentkernel", "A": "1"}
    assert claude.hosts == list(presets.mode("claude"))
    with pytest.raises(errors.InvalidArgument, match="unknown security key"):
        resolve(CreateSandbox(security={"netwrok": True}))


@pytest.mark.parametrize(
    "spec",
    [
        CreateSandbox(profile="permissive"),
        CreateSandbox(mode="native"),
        CreateSandbox(mode="default"),
        CreateSandbox(hosts=["*"]),
        CreateSandbox(hosts=["*:443"]),
    ],
)
def test_ak_K15_requests_stay_below_the_ceiling(spec: CreateSandbox) -> None:
    with pytest.raises(errors.PermissionDenied, match="more than this server gives"):
        Ceiling().check(spec)
    OPEN.check(spec)
    Ceiling().check(CreateSandbox(profile="restrictive", mode="codex", hosts=["example.com"]))


@pytest.mark.parametrize(
    "text",
    [
        '[security]\nprofile = "permissive"\n',
        "[security]\nmount_home = true\n",
        "[security]\npass_env = true\n",
        '[api]\napi_key = "x"\n',
        '[agent]\ncompatibility_mode = "native"\n',
        '[security.domains]\nallow = ["*"]\n',
    ],
)
def test_ak_K12_a_found_file_may_not_ask_for_more(tmp_path: Path, text: str) -> None:
    with pytest.raises(errors.PermissionDenied) as caught:
        found(tmp_path, text)
    assert "--config" in caught.value.hint
    named(tmp_path, text)


def test_ak_P15_a_found_file_chooses_mode_profile_and_mount(tmp_path: Path) -> None:
    file = found(tmp_path, '[sandbox]\nname = "x"\n[agent]\ncompatibility_mode = "claude"\n')
    assert policy.combine(flags(), file)[0].mode == "claude"
    assert policy.combine(flags(compatibility_mode="codex"), file)[0].mode == "codex"
    assert not policy.combine(flags(no_network=True), file)[0].network
    file = found(tmp_path, "[security]\nnetwork = true\nmount_cwd = true\n")
    assert policy.combine(flags(), file)[0].mount_cwd


def test_ak_K5_a_found_file_never_widens_what_flags_narrowed(tmp_path: Path) -> None:
    file = found(tmp_path, '[security]\nnetwork = true\nmount_cwd = true\nread_only = false\nseccomp = "default"\n')
    strict, _, keys = policy.combine(flags(profile="restrictive"), file)
    assert (strict.network, strict.mount_cwd, strict.read_only, strict.seccomp) == (False, False, True, "restrictive")
    assert keys == {}
    narrow = found(tmp_path, '[security]\nnetwork = false\nread_only = true\nseccomp = "restrictive"\n')
    less, _, _ = policy.combine(flags(profile="moderate"), narrow)
    assert (less.network, less.read_only, less.seccomp) == (False, True, "restrictive")
    trusted = named(tmp_path, "[security]\nnetwork = true\n")
    assert policy.combine(flags(profile="restrictive"), trusted)[0].network


def test_unknown_keys_are_errors_where_it_matters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        found(tmp_path, "[security]\nnetwrk = false\n")
    assert "`network`" in caught.value.hint
    with pytest.raises(errors.InvalidArgument):
        found(tmp_path, '[security.domains]\nalow = ["x.com"]\n')
    found(tmp_path, '[sandbox]\nname = "x"\nflavour = "y"\n[secrets]\na = 1\n')
    warned = capfd.readouterr().err
    assert warned.count("Warning:") == 2 and "flavour" in warned and "[secrets] is not supported" in warned
    with pytest.raises(errors.InvalidArgument):
        found(tmp_path, "[sandbx]\n", "atoll.toml")
    with pytest.raises(errors.InvalidArgument, match="must be true or false"):
        named(tmp_path, '[security]\nnetwork = "yes"\n')
    with pytest.raises(errors.InvalidArgument):
        named(tmp_path, "not toml at all")


def test_usage_errors_for_unknown_flag_values() -> None:
    with pytest.raises(UsageError):
        policy.combine(flags(profile="bogus"), None)
    with pytest.raises(UsageError):
        policy.combine(flags(compatibility_mode="bogus"), None)


def test_domain_rules() -> None:
    assert policy._spread(["*.x.com", "y.com"]) == ["x.com", "*.x.com", "y.com"]
    assert policy._without(dict.fromkeys(["a.com", "b.com"]), ["b.com"], "f") == ["a.com"]
    with pytest.raises(errors.Unsupported):
        policy._without(dict.fromkeys(["*"]), ["b.com"], "f")
    with pytest.raises(errors.Unsupported):
        policy._without(dict.fromkeys(["*.com.example"]), ["b.com.example"], "f")


def test_command_rules(tmp_path: Path) -> None:
    file = found(tmp_path, '[security.commands]\nblock = ["curl"]\n')
    file.check_command(["ls"])
    with pytest.raises(errors.PermissionDenied):
        file.check_command(["/usr/bin/curl", "x"])
    file = found(tmp_path, '[security.commands]\nallow = ["python3"]\nallowlist_only = true\n')
    file.check_command(["python3"])
    with pytest.raises(errors.PermissionDenied):
        file.check_command(["sh"])


def test_files_outside_the_directory_need_a_named_file(tmp_path: Path) -> None:
    inner = tmp_path / "p"
    inner.mkdir()
    (tmp_path / "secret").write_text("s")
    (inner / "link").symlink_to(tmp_path / "secret")
    for source in ("../secret", "link", str(tmp_path / "secret")):
        file = found(inner, f'[[files]]\nsource = "{source}"\ndest = "/workspace/s"\n')
        with pytest.raises(errors.PermissionDenied):
            file.files()
        assert (
            named(inner, f'[[files]]\nsource = "{source}"\ndest = "/workspace/s"\nmode = "0600"\n').files()[0]["mode"]
            == 0o600
        )


def test_a_key_without_the_admin_scope_is_below_the_ceiling() -> None:
    def key(*scopes: str) -> KeyHolder:
        return KeyHolder("key:a", 65534, 65534, "key", "a", "id", scopes, {}, "")

    assert ceiling_of(local(0, 0)) == OPEN and ceiling_of(key("use", "admin")) == OPEN
    assert ceiling_of(key("use")) == Ceiling()
