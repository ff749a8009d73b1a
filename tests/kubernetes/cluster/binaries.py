"""Fetch and build the programs of the test cluster, each of a pinned version, into the cache.

Everything comes from the Go module proxy and from Debian, by name and version, through their own
clients. One multi-call program holds all of Kubernetes and the network policy enforcer, so that
shared packages are compiled and linked once.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

KUBERNETES = "1.36.4"
AGENT_SANDBOX = "v1.0.3"
KUBE_ROUTER = "v2.1.0"
HELM = "v3.22.0"
GVISOR = "v0.0.0-20260224225140-573d5e7127a8"  # of the branch `go`, which the plain Go tool builds
# The modules that Kubernetes' own go.mod replaces by directories.
STAGING = (
    "api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider "
    "cluster-bootstrap code-generator component-base component-helpers controller-manager cri-api "
    "cri-client cri-streaming csi-translation-lib dynamic-resource-allocation endpointslice "
    "externaljwt kms kube-aggregator kube-controller-manager kube-proxy kube-scheduler kubectl "
    "kubelet metrics mount-utils pod-security-admission sample-apiserver sample-cli-plugin "
    "sample-controller streaming"
)
PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kube-netpol",
    "kubelet",
    "kubectl",
)
PACKAGES = (
    "runc",
    "iptables",
    "ipset",
    "conntrack",
    "containernetworking-plugins",
    "busybox-static",
    "mmdebstrap",
    "openssl",
)
NEXT_PACKAGES = ("containerd", "etcd-server")  # of Debian 13; they run on 12 as they are
NEXT_PROGRAMS = ("containerd", "ctr", "containerd-shim-runc-v2", "etcd")

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("ATOLL_K8S_CACHE", Path.home() / ".cache/atoll-k8s"))
BIN = CACHE / "bin"
DEBIAN = CACHE / "debian-root"
KUBE, CONTROLLER, HELM_PROGRAM = BIN / "kube", BIN / "agent-sandbox-controller", BIN / "helm"
GVISOR_COMMANDS = {
    "gvisor.dev/gvisor/runsc": BIN / "runsc",
    "gvisor.dev/gvisor/shim": BIN / "containerd-shim-runsc-v1",
}


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def run(*words: object, check: bool = True, **options: object) -> str:
    argv = [str(word) for word in words]
    done = subprocess.run(argv, text=True, capture_output=True, **options)
    if check and done.returncode:
        sys.exit(f"{' '.join(argv)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout.strip()


def build() -> None:
    """Make what is missing; two at a time would do the work twice, so the second waits."""
    BIN.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for step in STEPS:
            started = time.monotonic()
            if step():
                say(f"{step.__name__}: {time.monotonic() - started:.0f} s")
    say(f"built, in {BIN}")


def missing() -> list[str]:
    """Return the names of what `build` would still have to make."""
    names = [f"package {name}" for name in missing_packages()]
    names += [name for name in NEXT_PROGRAMS if not (BIN / name).exists()]
    names += [] if DEBIAN.exists() else [DEBIAN.name]
    targets = {KUBE: kube_inputs(), CONTROLLER: (AGENT_SANDBOX,), HELM_PROGRAM: (HELM, KUBERNETES)}
    targets |= {target: (GVISOR,) for target in GVISOR_COMMANDS.values()}
    return names + [target.name for target, inputs in targets.items() if not is_current(target, *inputs)]


def missing_packages() -> list[str]:
    status = {name: run("dpkg-query", "-Wf", "${Status}", name, check=False) for name in PACKAGES}
    return [name for name, text in status.items() if "install ok" not in text]


def install_packages() -> bool:
    if not (names := missing_packages()):
        return False
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *names, env=env)
    return True


def fetch_next_packages() -> bool:
    """Unpack containerd and etcd of the next Debian into the cache; the system's packages stay."""
    if all((BIN / name).exists() for name in NEXT_PROGRAMS):
        return False
    work = CACHE / "debian"
    shutil.rmtree(work, ignore_errors=True)
    for folder in ("lists/partial", "cache/archives/partial", "out", "unpacked"):
        (work / folder).mkdir(parents=True)
    places = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
    source = next(path for path in map(Path, places) if path.exists())
    listing = work / f"next{source.suffix}"
    listing.write_text(source.read_text().replace("bookworm", "trixie"))
    settings = (
        f"Dir::Etc::sourcelist={listing}",
        "Dir::Etc::sourceparts=-",
        f"Dir::State::lists={work}/lists",
        f"Dir::Cache={work}/cache",
        "APT::Sandbox::User=root",
    )
    apt = ["apt-get", "-qq", *(word for setting in settings for word in ("-o", setting))]
    run(*apt, "update")
    run(*apt, "download", *NEXT_PACKAGES, cwd=work / "out")
    for package in (work / "out").iterdir():
        run("dpkg", "-x", package, work / "unpacked")
    for name in NEXT_PROGRAMS:
        shutil.copy2(work / "unpacked/usr/bin" / name, BIN / name)
    shutil.rmtree(work)
    return True


def make_debian() -> bool:
    """Unpack a small Debian with Python and curl, the image of the sandboxes in tests."""
    if (DEBIAN / "usr/bin/curl").exists():
        return False
    shutil.rmtree(DEBIAN, ignore_errors=True)
    unfinished = DEBIAN.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    run("mmdebstrap", "--variant=minbase", "--include=python3,curl", "bookworm", unfinished)
    for folder in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
        shutil.rmtree(unfinished / folder, ignore_errors=True)
    unfinished.rename(DEBIAN)
    return True


def go(*words: object, cwd: Path, **environment: str) -> str:
    """Run the Go tool at low priority.

    The checksum database does not know kube-router's tag: that module is pinned by version alone.
    """
    env = {
        **os.environ,
        "PATH": f"{os.environ['PATH']}:/usr/local/go/bin",
        "GOFLAGS": "-mod=mod -p=2",
        "CGO_ENABLED": "0",
        "GONOSUMDB": "github.com/cloudnativelabs/kube-router/v2",
        **environment,
    }
    return run("nice", "-n", "15", "go", *words, cwd=cwd, env=env)


def make_module(name: str, requires: dict[str, str], replaces: dict[str, str], tools: list[str]) -> Path:
    """Write an empty Go module that pins versions; what is built is only named in it.

    `k8s.io/kubernetes` cannot be installed directly: its go.mod replaces modules by directories.
    """
    folder = CACHE / "src" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lines = [f"module {name}", "go 1.26.0"]
    lines += [f"require {module} {version}" for module, version in requires.items()]
    lines += [f"replace {module} => {module} {version}" for module, version in replaces.items()]
    lines += [f"tool {tool}" for tool in tools]
    (folder / "go.mod").write_text("\n".join(lines) + "\n")
    return folder


def stamp_of(target: Path, inputs: tuple[object, ...]) -> tuple[Path, str]:
    return target.with_name(f".{target.name}.from"), hashlib.sha256(repr(inputs).encode()).hexdigest()


def is_current(target: Path, *inputs: object) -> bool:
    """Return whether `target` was made from exactly these inputs."""
    stamp, key = stamp_of(target, inputs)
    return target.exists() and stamp.exists() and stamp.read_text() == key


def discard(target: Path, *inputs: object) -> None:
    """Remove an old `target` and note what the new one is made from."""
    stamp, key = stamp_of(target, inputs)
    target.unlink(missing_ok=True)
    stamp.write_text(key)


def kube_sources() -> list[Path]:
    return sorted((HERE / "kube").glob("*.go"))


def kube_inputs() -> tuple[object, ...]:
    return KUBERNETES, KUBE_ROUTER, [source.read_text() for source in kube_sources()]


def build_kube() -> bool:
    if is_current(KUBE, *kube_inputs()):
        return False
    discard(KUBE, *kube_inputs())
    say(f"compiling Kubernetes {KUBERNETES}: ten minutes on two idle cores")
    staging = "v0" + KUBERNETES[1:]
    requires = {
        "k8s.io/kubernetes": "v" + KUBERNETES,
        "github.com/cloudnativelabs/kube-router/v2": KUBE_ROUTER,
    }
    folder = make_module("kube", requires, {f"k8s.io/{name}": staging for name in STAGING.split()}, [])
    for source in kube_sources():
        shutil.copy2(source, folder)
    version = f"-X k8s.io/component-base/version.gitVersion=v{KUBERNETES}"
    go("mod", "tidy", cwd=folder)
    go("build", "-ldflags", f"-s -w {version}", "-o", KUBE, ".", cwd=folder)
    for name in PROGRAMS:
        (BIN / name).unlink(missing_ok=True)
        (BIN / name).symlink_to("kube")
    return True


def build_controller() -> bool:
    if is_current(CONTROLLER, AGENT_SANDBOX):
        return False
    discard(CONTROLLER, AGENT_SANDBOX)
    say(f"compiling the agent-sandbox controller {AGENT_SANDBOX}")
    project = "sigs.k8s.io/agent-sandbox"
    command = f"{project}/cmd/agent-sandbox-controller"
    folder = make_module("controller", {project: AGENT_SANDBOX}, {}, [command])
    go("mod", "tidy", cwd=folder)
    go("build", "-ldflags", "-s -w", "-o", CONTROLLER, command, cwd=folder)
    source = Path(go("list", "-m", "-f", "{{.Dir}}", project, cwd=folder))
    shutil.rmtree(CACHE / "crds", ignore_errors=True)
    shutil.copytree(source / "k8s/crds", CACHE / "crds", copy_function=shutil.copyfile)
    return True


def build_gvisor() -> bool:
    if all(is_current(target, GVISOR) for target in GVISOR_COMMANDS.values()):
        return False
    for target in GVISOR_COMMANDS.values():
        discard(target, GVISOR)
    say("compiling gVisor and its shim")
    folder = make_module("gvisor", {"gvisor.dev/gvisor": GVISOR}, {}, list(GVISOR_COMMANDS))
    go("mod", "tidy", cwd=folder)
    go("mod", "vendor", cwd=folder)
    # The shim asks for an OOM score below zero, and ends where root lacks CAP_SYS_RESOURCE.
    service = folder / "vendor/gvisor.dev/gvisor/pkg/shim/v1/service.go"
    asked, harmless = "oomScoreMaxKillable = -999", "oomScoreMaxKillable = 0"
    service.write_text(service.read_text().replace(asked, harmless))
    for command, target in GVISOR_COMMANDS.items():
        words = ("build", "-trimpath", "-ldflags", "-s -w", "-o", target, command)
        go(*words, cwd=folder, GOFLAGS="-mod=vendor -p=2")
    return True


def build_helm() -> bool:
    """Build helm; most of its packages are the controller's too. It is told for which Kubernetes it renders."""
    if is_current(HELM_PROGRAM, HELM, KUBERNETES):
        return False
    discard(HELM_PROGRAM, HELM, KUBERNETES)
    say(f"compiling helm {HELM}")
    command = "helm.sh/helm/v3/cmd/helm"
    folder = make_module("helm", {"helm.sh/helm/v3": HELM}, {}, [command])
    go("mod", "tidy", cwd=folder)
    major, minor, _ = KUBERNETES.split(".")
    place = "helm.sh/helm/v3/pkg/chartutil.k8sVersion"
    flags = f"-s -w -X {place}Major={major} -X {place}Minor={minor}"
    go("build", "-ldflags", flags, "-o", HELM_PROGRAM, command, cwd=folder)
    return True


STEPS = (
    install_packages,
    fetch_next_packages,
    make_debian,
    build_kube,
    build_controller,
    build_gvisor,
    build_helm,
)
