"""Start the cluster's control plane: certificates, etcd, Kubernetes' own programs, the controller."""

import json
from pathlib import Path

from binaries import BIN, CACHE, run
from processes import STATE, start, wait_for

PKI, ADMIN = STATE / "pki", STATE / "admin.kubeconfig"
BRIDGE, HOST = "atollk8s", "10.93.0.1"  # the wire between the nodes, this machine's address on it
SERVICES, CONTROL_GROUP = "10.96.0.0/16", "atoll-k8s"
STORE = "http://127.0.0.1:12379"
# In the order in which they are stopped.
PROGRAMS = (
    "agent-sandbox-controller",
    "kube-scheduler",
    "kube-controller-manager",
    "kube-apiserver",
    "etcd",
)
API_NAMES = (
    f"IP:{HOST},IP:10.96.0.1,IP:127.0.0.1,DNS:localhost,"
    "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
)


def make_certificate(name: str, subject: str, names: str = "") -> None:
    words: list[object] = ["-subj", subject, "-keyout", PKI / f"{name}.key", "-out", PKI / f"{name}.crt"]
    if name != "ca":
        words += ["-CA", PKI / "ca.crt", "-CAkey", PKI / "ca.key"]
        words += ["-addext", "basicConstraints=critical,CA:FALSE"]
    if names:
        words += ["-addext", f"subjectAltName={names}"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    run("openssl", "req", "-x509", *curve, "-nodes", "-days", "365", *words)


def write_kubeconfig(path: Path, name: str) -> None:
    cluster = {"server": f"https://{HOST}:6443", "certificate-authority": str(PKI / "ca.crt")}
    user = {"client-certificate": str(PKI / f"{name}.crt"), "client-key": str(PKI / f"{name}.key")}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
    }
    path.write_text(json.dumps(document))
    path.chmod(0o600)


def kubectl(*words: object, **options: object) -> str:
    return run(BIN / "kubectl", "--kubeconfig", ADMIN, *words, **options)


def start_all() -> None:
    make_certificates()
    start_kubernetes()
    install_objects()
    start_controller()


def make_certificates() -> None:
    make_certificate("ca", "/CN=atoll-lab")
    make_certificate("apiserver", "/CN=kube-apiserver", API_NAMES)
    make_certificate("admin", "/O=system:masters/CN=admin")
    for name in ("kube-controller-manager", "kube-scheduler"):
        make_certificate(name, f"/CN=system:{name}")
        write_kubeconfig(STATE / f"{name}.kubeconfig", name)
    write_kubeconfig(ADMIN, "admin")
    key = PKI / "accounts.key"
    run("openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", key)


def start_kubernetes() -> None:
    start_program(
        "etcd",
        "etcd",
        data_dir=STATE / "etcd",
        listen_client_urls=STORE,
        advertise_client_urls=STORE,
        listen_peer_urls="http://127.0.0.1:12380",
        log_level="warn",
        unsafe_no_fsync=True,
    )
    start_program(
        "kube-apiserver",
        etcd_servers=STORE,
        bind_address=HOST,
        advertise_address=HOST,
        secure_port=6443,
        tls_cert_file=PKI / "apiserver.crt",
        tls_private_key_file=PKI / "apiserver.key",
        client_ca_file=PKI / "ca.crt",
        kubelet_client_certificate=PKI / "admin.crt",
        kubelet_client_key=PKI / "admin.key",
        kubelet_preferred_address_types="InternalIP",
        service_account_issuer="https://kubernetes.default.svc",
        service_account_key_file=PKI / "accounts.key",
        service_account_signing_key_file=PKI / "accounts.key",
        service_cluster_ip_range=SERVICES,
        authorization_mode="Node,RBAC",
        allow_privileged=True,
        cert_dir=STATE / "apiserver",
        default_not_ready_toleration_seconds=5,
        default_unreachable_toleration_seconds=5,
    )
    wait_for("kube-apiserver", lambda: kubectl("get", "--raw", "/readyz", check=False) == "ok")
    start_program(
        "kube-controller-manager",
        kubeconfig=STATE / "kube-controller-manager.kubeconfig",
        leader_elect=False,
        use_service_account_credentials=True,
        root_ca_file=PKI / "ca.crt",
        service_account_private_key_file=PKI / "accounts.key",
        secure_port=0,
        enable_hostpath_provisioner=True,
        node_monitor_period="1s",
        node_monitor_grace_period="8s",
    )
    start_program(
        "kube-scheduler",
        kubeconfig=STATE / "kube-scheduler.kubeconfig",
        leader_elect=False,
        secure_port=0,
    )


def start_program(name: str, program: object = None, **flags: object) -> None:
    """Start a program with `--flag-name=value` for each keyword."""
    start(name, program or BIN / name, *write_flags(flags))


def write_flags(flags: dict[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={write_value(value)}" for name, value in flags.items()]


def write_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def install_objects() -> None:
    kubectl("apply", "--server-side", "-f", CACHE / "crds")
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    objects = [
        {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": "gvisor"},
            "handler": "runsc",
        },
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": "standard", "annotations": default},
            "provisioner": "kubernetes.io/host-path",
        },
    ]
    kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")


def start_controller() -> None:
    start_program(
        "agent-sandbox-controller",
        kubeconfig=ADMIN,
        extensions=True,
        leader_elect=False,
        metrics_bind_address="127.0.0.1:18080",
        health_probe_bind_address="127.0.0.1:18081",
    )
