//! The OCI configuration as the direct engine understands it: exactly the shape that our own bundles have. Anything else, also a
//! value that asks for something this engine would do otherwise, is refused before anything is made.

use crate::failure::{Failure, Result};
use crate::order::{text, Fields};
use serde_json::Value;

pub struct Oci {
    pub hostname: String,
    pub root: String,
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub cwd: String,
    /// One bit each; the bounding, permitted and effective sets alike.
    pub capabilities: u64,
    pub mounts: Vec<Mount>,
    pub masked: Vec<String>,
    pub read_only: Vec<String>,
    pub cgroup: String,
}

pub struct Mount {
    pub target: String,
    pub kind: String,
    pub source: String,
    pub flags: libc::c_ulong,
    pub options: String,
}

/// How the configuration names the namespaces that were made ahead.
const MADE: [(&str, &str); 2] = [("user", "/proc/self/fd/4"), ("network", "/proc/self/fd/5")];
const NEW: [&str; 5] = ["pid", "mount", "ipc", "uts", "cgroup"];
/// Those that a sandbox may have at all, with the kernel's numbers.
const CAPABILITIES: [(&str, u32); 8] = [
    ("CAP_CHOWN", 0),
    ("CAP_DAC_OVERRIDE", 1),
    ("CAP_FOWNER", 3),
    ("CAP_FSETID", 4),
    ("CAP_KILL", 5),
    ("CAP_SETGID", 6),
    ("CAP_SETUID", 7),
    ("CAP_NET_BIND_SERVICE", 10),
];

/// `first` and `count`: the ids of the user namespace that was made ahead. `stage`: where the launcher has put the root together.
pub fn parse(config: &str, first: u32, count: u32, stage: &str) -> Result<Oci> {
    let mut top = Fields::of(serde_json::from_str(config).map_err(|e| bad(&format!("not JSON: {e}")))?)?;
    is(top.take("ociVersion")?, "1.0.2".into(), "ociVersion")?;
    let mut root = Fields::of(top.take("root")?)?;
    let path = root.text("path")?;
    is(path.clone().into(), format!("{stage}/root").into(), "root.path")?;
    is(root.take("readonly")?, false.into(), "root.readonly")?; // the launcher's work
    root.end()?;
    let (process, linux) = (process(top.take("process")?)?, linux(top.take("linux")?, first, count)?);
    let oci = Oci {
        hostname: top.text("hostname")?,
        root: path,
        args: process.args,
        env: process.env,
        cwd: process.cwd,
        capabilities: process.capabilities,
        mounts: top.list("mounts", mount)?,
        masked: linux.masked,
        read_only: linux.read_only,
        cgroup: linux.cgroup,
    };
    top.end()?;
    if let Some(other) = oci.mounts.iter().find(|mount| mount.kind == "bind" && !is_view(mount, stage)) {
        return Err(bad(&format!("a bind of {} on {}", other.source, other.target)));
    }
    let at = |target: &str| oci.mounts.iter().position(|mount| mount.target == target);
    let dev = at("/dev").filter(|_| at("/proc").is_some()).ok_or_else(|| bad("no /proc or no /dev"))?;
    if oci.mounts[..dev].iter().any(|mount| mount.target.starts_with("/dev/")) {
        return Err(bad("a mount in the image's own /dev")); // which is not looked at: only the fresh one is known to hold no links
    }
    if at("/sys").is_none() && oci.mounts.iter().any(|mount| mount.kind == "bind") {
        return Err(bad("a bind and no /sys"));
    }
    Ok(oci)
}

struct Process {
    args: Vec<String>,
    env: Vec<String>,
    cwd: String,
    capabilities: u64,
}

fn process(value: Value) -> Result<Process> {
    let mut process = Fields::of(value)?;
    is(process.take("terminal")?, false.into(), "terminal")?;
    is(process.take("user")?, serde_json::json!({"uid": 0, "gid": 0}), "user")?;
    is(process.take("noNewPrivileges")?, true.into(), "noNewPrivileges")?;
    let mut sets = Fields::of(process.take("capabilities")?)?;
    let bounding = sets.list("bounding", capability)?.into_iter().fold(0, |all, one| all | one);
    for name in ["effective", "permitted"] {
        if sets.list(name, capability)?.into_iter().fold(0, |all, one| all | one) != bounding {
            return Err(bad("sets of capabilities that differ"));
        }
    }
    sets.end()?;
    let found = Process {
        args: process.list("args", text)?,
        env: process.list("env", text)?,
        cwd: process.text("cwd")?,
        capabilities: bounding,
    };
    process.end()?;
    if !found.args.first().is_some_and(|program| program.starts_with('/')) || !found.cwd.starts_with('/') {
        return Err(bad("program and working directory have to be absolute"));
    }
    Ok(found)
}

fn capability(value: Value) -> Result<u64> {
    let name = text(value)?;
    let known = CAPABILITIES.iter().find(|(known, _)| *known == name);
    known.map(|(_, number)| 1 << number).ok_or_else(|| bad(&format!("the capability {name}")))
}

struct Linux {
    masked: Vec<String>,
    read_only: Vec<String>,
    cgroup: String,
}

fn linux(value: Value, first: u32, count: u32) -> Result<Linux> {
    let mut linux = Fields::of(value)?;
    let ids = serde_json::json!([{"containerID": 0, "hostID": first, "size": count}]);
    is(linux.take("uidMappings")?, ids.clone(), "uidMappings")?;
    is(linux.take("gidMappings")?, ids, "gidMappings")?;
    let made = MADE.iter().map(|(kind, path)| serde_json::json!({"type": kind, "path": path}));
    let new = NEW.iter().map(|kind| serde_json::json!({"type": kind}));
    is(linux.take("namespaces")?, made.chain(new).collect(), "namespaces")?;
    let devices = serde_json::json!({"devices": [{"allow": false, "access": "rwm"}]});
    is(linux.take("resources")?, devices, "resources")?;
    if !linux.take("seccomp")?.is_object() {
        return Err(bad("no filter of system calls")); // its program comes beside the configuration, made of this very part
    }
    let found = Linux {
        masked: linux.list("maskedPaths", below_kernel)?,
        read_only: linux.list("readonlyPaths", below_kernel)?,
        cgroup: linux.text("cgroupsPath")?,
    };
    linux.end()?;
    Ok(found)
}

/// Only in file systems of the kernel's: there no sandbox of an earlier day has left a link.
fn below_kernel(value: Value) -> Result<String> {
    let path = text(value)?;
    let plain = !path.split('/').any(|part| part == "." || part == "..");
    if plain && (path.starts_with("/proc/") || path.starts_with("/sys/")) {
        return Ok(path);
    }
    Err(bad(&format!("{path} is neither below /proc nor below /sys")))
}

/// The files in which programs see their limits (`view.rs`), each with the places where it is bound.
const VIEW: [(&str, &[&str]); 5] = [
    ("meminfo", &["/proc/meminfo"]),
    ("cpuinfo", &["/proc/cpuinfo"]),
    ("stat", &["/proc/stat"]),
    (
        "cpus",
        &["/sys/devices/system/cpu/online", "/sys/devices/system/cpu/possible", "/sys/devices/system/cpu/present"],
    ),
    ("fs", &["/sys/fs"]),
];

/// Only of the view's own files, each on its own place, as closed as the launcher has made it.
fn is_view(mount: &Mount, stage: &str) -> bool {
    let closed = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC | libc::MS_BIND | libc::MS_REC;
    let name = mount.source.strip_prefix(stage).and_then(|rest| rest.strip_prefix("/seen/"));
    let known = VIEW.iter().any(|(file, places)| name == Some(*file) && places.contains(&mount.target.as_str()));
    known && mount.flags == closed && mount.options.is_empty()
}

fn mount(value: Value) -> Result<Mount> {
    let mut fields = Fields::of(value)?;
    let (target, kind) = (fields.text("destination")?, fields.text("type")?);
    let places: &[&str] = match kind.as_str() {
        "proc" => &["/proc"],
        "sysfs" => &["/sys"],
        "devpts" => &["/dev/pts"],
        "mqueue" => &["/dev/mqueue"],
        "tmpfs" => &["/dev", "/dev/shm", "/tmp"],
        "bind" => &[], // looked at when all are known
        _ => return Err(bad(&format!("a mount of type {kind}"))),
    };
    if kind != "bind" && !places.contains(&target.as_str()) {
        return Err(bad(&format!("{kind} on {target}")));
    }
    let mut found = Mount { target, kind, source: fields.text("source")?, flags: 0, options: String::new() };
    for option in fields.list("options", text)? {
        match option.as_str() {
            "nosuid" => found.flags |= libc::MS_NOSUID,
            "nodev" => found.flags |= libc::MS_NODEV,
            "noexec" => found.flags |= libc::MS_NOEXEC,
            "ro" => found.flags |= libc::MS_RDONLY,
            "rbind" if found.kind == "bind" => found.flags |= libc::MS_BIND | libc::MS_REC,
            _ if is_data(&option) => {
                found.options += if found.options.is_empty() { "" } else { "," };
                found.options += &option;
            }
            _ => return Err(bad(&format!("the mount option {option}"))),
        }
    }
    fields.end()?;
    Ok(found)
}

/// Options that the file system itself reads.
fn is_data(option: &str) -> bool {
    const KNOWN: [&str; 5] = ["mode", "size", "nr_inodes", "ptmxmode", "max"];
    match option.split_once('=') {
        Some((name, value)) => KNOWN.contains(&name) && value.bytes().all(|b| b.is_ascii_alphanumeric()),
        None => option == "newinstance",
    }
}

fn is(value: Value, wanted: Value, what: &str) -> Result<()> {
    if value == wanted {
        return Ok(());
    }
    Err(bad(&format!("{what} is {value}, not {wanted}")))
}

fn bad(why: &str) -> Failure {
    Failure::new("configuration", format!("the direct engine does not take this configuration: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"ociVersion":"1.0.2","root":{"path":"/mnt/root","readonly":false},"hostname":"h",
        "process":{"terminal":false,"user":{"uid":0,"gid":0},"args":["/a","b"],"env":[],"cwd":"/",
            "capabilities":{"bounding":["CAP_KILL"],"effective":["CAP_KILL"],"permitted":["CAP_KILL"]},"noNewPrivileges":true},
        "mounts":[{"destination":"/proc","type":"proc","source":"proc","options":[]},
            {"destination":"/dev","type":"tmpfs","source":"tmpfs","options":["nosuid","mode=755"]}],
        "linux":{"uidMappings":[{"containerID":0,"hostID":7,"size":9}],"gidMappings":[{"containerID":0,"hostID":7,"size":9}],
            "namespaces":[{"type":"user","path":"/proc/self/fd/4"},{"type":"network","path":"/proc/self/fd/5"},{"type":"pid"},
                {"type":"mount"},{"type":"ipc"},{"type":"uts"},{"type":"cgroup"}],
            "cgroupsPath":"/atoll/m/b","resources":{"devices":[{"allow":false,"access":"rwm"}]},
            "maskedPaths":["/proc/keys"],"readonlyPaths":["/proc/sys"],"seccomp":{}}}"#;

    #[test]
    fn our_own_shape_is_understood() {
        let found = parse(GOOD, 7, 9, "/mnt").map_err(|f| f.to_json());
        assert_eq!(found.as_ref().map(|o| (o.capabilities, o.mounts[1].flags)).ok(), Some((1 << 5, libc::MS_NOSUID)));
        assert_eq!(found.map(|o| o.mounts[1].options.clone()).ok().as_deref(), Some("mode=755"));
    }

    #[test]
    fn only_the_view_is_bound_and_only_read() {
        let with = |source: &str, target: &str, options: &str| {
            let sys = r#"{"destination":"/sys","type":"sysfs","source":"sysfs","options":[]}"#;
            let bind =
                format!(r#"{{"destination":"{target}","type":"bind","source":"{source}","options":[{options}]}}"#);
            parse(&GOOD.replace("\"mode=755\"]}]", &format!("\"mode=755\"]}},{sys},{bind}]")), 7, 9, "/mnt").is_ok()
        };
        let closed = r#""rbind","ro","nosuid","nodev","noexec""#;
        assert!(with("/mnt/seen/meminfo", "/proc/meminfo", closed));
        assert!(with("/mnt/seen/fs", "/sys/fs", closed));
        for (source, target, options) in [
            ("/proc/meminfo", "/proc/meminfo", closed),
            ("/mnt/seen/../disk", "/sys/fs", closed),
            ("/mnt/seen/fs", "/workspace", closed),
            ("/mnt/seen/meminfo", "/proc/stat", closed),
            ("/mnt/seen/meminfo", "/proc/meminfo", r#""rbind","nosuid","nodev","noexec""#),
            ("/mnt/seen/meminfo", "/proc/meminfo", r#""rbind","ro","nosuid","nodev""#),
            ("/mnt/seen/meminfo", "/proc/meminfo", r#""ro","nosuid","nodev","noexec""#),
        ] {
            assert!(!with(source, target, options), "{source} {target} {options}");
        }
    }

    #[test]
    fn whatever_else_is_asked_for_is_refused() {
        for (old, new) in [
            ("\"hostname\":\"h\"", "\"hostname\":\"h\",\"hooks\":{}"),
            ("\"hostname\":\"h\"", "\"hostname\":\"h\",\"annotations\":{}"),
            ("\"readonly\":false", "\"readonly\":true"),
            ("/mnt/root", "/"),
            ("\"terminal\":false", "\"terminal\":true"),
            ("\"gid\":0}", "\"gid\":0,\"additionalGids\":[5]}"),
            ("\"uid\":0", "\"uid\":1"),
            ("\"noNewPrivileges\":true", "\"noNewPrivileges\":false"),
            ("\"noNewPrivileges\":true", "\"noNewPrivileges\":true,\"rlimits\":[]"),
            ("\"noNewPrivileges\":true", "\"noNewPrivileges\":true,\"apparmorProfile\":\"x\""),
            ("\"effective\":[\"CAP_KILL\"]", "\"effective\":[]"),
            ("\"effective\":[\"CAP_KILL\"]", "\"effective\":[\"CAP_KILL\"],\"ambient\":[]"),
            ("\"bounding\":[\"CAP_KILL\"]", "\"bounding\":[\"CAP_SYS_ADMIN\"]"),
            ("\"cwd\":\"/\"", "\"cwd\":\"x\""),
            ("[\"/a\",\"b\"]", "[]"),
            ("\"mode=755\"", "\"suid\""),
            ("\"mode=755\"", "\"mode=7,uid=0\""),
            ("\"mode=755\"", "\"uid=0\""),
            ("\"tmpfs\",\"source\"", "\"bind\",\"source\""),
            ("\"destination\":\"/dev\"", "\"destination\":\"/etc\""),
            ("\"destination\":\"/dev\"", "\"destination\":\"/dev/shm\""),
            ("\"/proc\",\"type\":\"proc\"", "\"/dev/pts\",\"type\":\"devpts\""),
            ("\"hostID\":7", "\"hostID\":0"),
            ("/proc/self/fd/4", "/proc/1/ns/user"),
            ("{\"type\":\"ipc\"},", ""),
            ("{\"type\":\"ipc\"}", "{\"type\":\"ipc\",\"path\":\"/proc/1/ns/ipc\"}"),
            ("\"allow\":false", "\"allow\":true"),
            ("{\"devices\":", "{\"pids\":{},\"devices\":"),
            ("/proc/keys", "/etc/passwd"),
            ("/proc/sys\"", "/proc/../etc\""),
            ("\"seccomp\":{}", "\"seccomp\":null"),
            (",\"seccomp\":{}", ""),
            ("\"seccomp\":{}", "\"seccomp\":{},\"sysctl\":{}"),
            ("\"cgroupsPath\":\"/atoll/m/b\",", ""),
        ] {
            let changed = GOOD.replace(old, new);
            assert_ne!(changed, GOOD, "{old}");
            assert!(parse(&changed, 7, 9, "/mnt").is_err(), "{new}");
        }
    }
}
