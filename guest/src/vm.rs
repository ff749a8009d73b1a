//! The first process of a virtual machine: loads the drivers, puts the sandbox's files in place, and becomes the agent.
//!
//! The image is a read-only disk, what the sandbox writes goes to a second one; the boot message comes from the firmware's
//! configuration, and the agent's channel is a virtio serial port. The agent dials a socket of this machine; a process beside it
//! carries the bytes between the two. It takes the agent's connection and no other. Programs of the
//! sandbox's root can end that process, and with it only their own way out.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use crate::{sys, vm_net};

const MODULES: &str = "/modules";
const ORDER: &str = "/modules/order"; // one name a line, as they depend on each other
const ROOT: &str = "/root";
const IMAGE: &str = "/image";
const DISK: &str = "/disk";
const GROUPS: &str = "/groups";
const GROUP: &str = "/groups/sandbox";
const SELF: &str = "/init";
/// Mount points below the root, beside the kernel's own file systems.
const PLACES: [&str; 3] = ["workspace", "tmp", ".atoll"];
/// As a container has them: no disk, no memory, no console.
const DEVICES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];
const HARMLESS: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV;
const PORT: &str = "atoll";
const BOOT: &str = "/sys/firmware/qemu_fw_cfg/by_name/opt/atoll/boot/raw";
const AGENT: &str = "/.atoll/guest";
/// Where the agent dials; the host names it in the boot message.
const SOCKET: &str = "/dev/atoll-agent";
const MOST_FILES: u64 = 1 << 20;
const LAST_POSSIBLE: i32 = 63;
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Never returns but for an error; the machine stops when this process ends.
pub fn start() -> io::Result<()> {
    mount("devtmpfs", "/dev", "devtmpfs", 0, "")?;
    mount("proc", "/proc", "proc", 0, "")?;
    mount("sysfs", "/sys", "sysfs", 0, "")?;
    load_modules()?;
    let boot = fs::read(BOOT)?;
    let line = fs::read_to_string("/proc/cmdline")?;
    let port = OpenOptions::new().read(true).write(true).open(find_port()?)?;
    place_files(parameter(&line, "atoll.readonly=") == Some("1"))?;
    place_kernel_files(parameter(&line, "atoll.shm=").unwrap_or("64"))?;
    crate::boot::set_hostname(parameter(&line, "atoll.hostname=").unwrap_or("sandbox"));
    vm_net::start(parameter(&line, "atoll.net="))?;
    if let Some(most) = parameter(&line, "atoll.pids=") {
        limit_processes(most)?;
    }
    let listener = UnixListener::bind(format!("{ROOT}{SOCKET}"))?;
    // SAFETY: this process has one thread.
    if sys::check(unsafe { libc::fork() })? == 0 {
        carry(&listener, &port);
        return Ok(());
    }
    drop((listener, port));
    enter_root()?;
    hand_over(&boot)?;
    give_up_rights(parameter(&line, "atoll.caps=").and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0))?;
    Err(Command::new(AGENT).arg("agent").env_clear().exec())
}

/// The image with the sandbox's own layer over it, and the workspace, both on the sandbox's disk.
fn place_files(read_only: bool) -> io::Result<()> {
    mount(&find_disk("image")?, IMAGE, "erofs", libc::MS_RDONLY | HARMLESS, "")?;
    mount(&find_disk("disk")?, DISK, "ext4", HARMLESS | libc::MS_NOATIME, "discard")?;
    for name in ["upper", "work", "workspace"] {
        fs::create_dir_all(format!("{DISK}/{name}"))?;
    }
    let layers = format!("lowerdir={IMAGE},upperdir={DISK}/upper,workdir={DISK}/work,redirect_dir=nofollow");
    mount("overlay", ROOT, "overlay", HARMLESS | libc::MS_NOATIME, &layers)?;
    for name in PLACES {
        plain_directory(&format!("{ROOT}/{name}"))?;
    }
    let agent = format!("{ROOT}{AGENT}");
    if !fs::symlink_metadata(&agent).is_ok_and(|found| found.is_file()) {
        File::create_new(&agent)?;
    }
    mount(SELF, &agent, "", libc::MS_BIND, "")?;
    mount("", &agent, "", libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | HARMLESS, "")?;
    mount(&format!("{DISK}/workspace"), &format!("{ROOT}/workspace"), "", libc::MS_BIND, "")?;
    for name in ["dev", "proc", "sys"] {
        plain_directory(&format!("{ROOT}/{name}"))?;
    }
    if read_only {
        mount("", ROOT, "", libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | HARMLESS, "")?;
        mount("tmp", &format!("{ROOT}/tmp"), "tmpfs", HARMLESS | libc::MS_NOEXEC, "mode=1777,size=64m")?;
    }
    Ok(())
}

/// A directory to mount on. The tree may be an earlier start's own work: a link in its place is refused.
fn plain_directory(path: &str) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(io::Error::other(format!("{path} is no directory"))),
        Err(_) => fs::create_dir(path),
    }
}

/// The device of the disk with that serial number.
fn find_disk(serial: &str) -> io::Result<String> {
    loop {
        for entry in fs::read_dir("/sys/block")?.flatten() {
            let said = fs::read_to_string(entry.path().join("serial")).unwrap_or_default();
            if said.trim() == serial {
                return Ok(format!("/dev/{}", entry.file_name().to_string_lossy()));
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// This process and all below it may be so many. Nobody below can reach the group.
fn limit_processes(most: &str) -> io::Result<()> {
    mount("groups", GROUPS, "cgroup2", 0, "")?;
    fs::write(format!("{GROUPS}/cgroup.subtree_control"), "+pids")?;
    fs::create_dir_all(GROUP)?;
    fs::write(format!("{GROUP}/pids.max"), most)?;
    fs::write(format!("{GROUP}/cgroup.procs"), "0")
}

fn load_modules() -> io::Result<()> {
    for name in fs::read_to_string(ORDER)?.lines() {
        let file = File::open(format!("{MODULES}/{name}"))?;
        // SAFETY: a descriptor and an empty string.
        let done = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
        if done < 0 {
            let error = io::Error::last_os_error();
            return Err(io::Error::new(error.kind(), format!("{name}: {error}")));
        }
    }
    Ok(())
}

/// The device of our port. It appears a moment after its driver.
fn find_port() -> io::Result<String> {
    loop {
        for entry in fs::read_dir("/sys/class/virtio-ports")?.flatten() {
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            if name.trim() == PORT {
                return Ok(format!("/dev/{}", entry.file_name().to_string_lossy()));
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// A word of the kernel's command line that begins so.
fn parameter<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    line.split_whitespace().find_map(|word| word.strip_prefix(name))
}

/// Capabilities of the agent: only these, and never more; but as many open files as the sandbox may be given.
fn give_up_rights(kept: u64) -> io::Result<()> {
    sys::set_rlimit(libc::RLIMIT_NOFILE, MOST_FILES, MOST_FILES)?;
    for capability in (0..=LAST_POSSIBLE).filter(|n| kept & 1 << n == 0) {
        // SAFETY: numbers.
        unsafe {
            if libc::prctl(libc::PR_CAPBSET_READ, capability, 0, 0, 0) == 1 {
                sys::check(libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0))?;
            }
        }
    }
    // SAFETY: as above.
    sys::check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }).map(drop)
}

/// Mount the kernel's file systems below the sandbox's root, with a /dev/shm of so many MiB.
fn place_kernel_files(shm: &str) -> io::Result<()> {
    mount("dev", &format!("{ROOT}/dev"), "tmpfs", libc::MS_NOSUID | libc::MS_NOEXEC, "mode=755,size=256k")?;
    for (name, major, minor) in DEVICES {
        make_device(&format!("{ROOT}/dev/{name}"), libc::makedev(major, minor))?;
    }
    mount("devpts", &format!("{ROOT}/dev/pts"), "devpts", libc::MS_NOSUID, "ptmxmode=0666,mode=0620")?;
    mount("shm", &format!("{ROOT}/dev/shm"), "tmpfs", libc::MS_NOSUID | libc::MS_NODEV, &format!("size={shm}m"))?;
    mount("proc", &format!("{ROOT}/proc"), "proc", 0, "")?;
    mount("sysfs", &format!("{ROOT}/sys"), "sysfs", libc::MS_RDONLY, "")?;
    // The boot message with its secrets is below it.
    mount("masked", &format!("{ROOT}/sys/firmware"), "tmpfs", libc::MS_RDONLY, "")?;
    for (link, target) in
        [("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")]
    {
        std::os::unix::fs::symlink(target, format!("{ROOT}/dev/{link}"))?;
    }
    Ok(())
}

fn make_device(path: &str, number: libc::dev_t) -> io::Result<()> {
    let path = CString::new(path)?;
    // SAFETY: path ends with NUL; the mode is that of the node, whatever the mask is.
    unsafe {
        sys::check(libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o666, number))?;
        sys::check(libc::chmod(path.as_ptr(), 0o666)).map(drop)
    }
}

fn enter_root() -> io::Result<()> {
    std::env::set_current_dir(ROOT)?;
    mount(".", "/", "", libc::MS_MOVE, "")?;
    std::os::unix::fs::chroot(".")?;
    std::env::set_current_dir("/")
}

/// Leave the boot message where the agent reads it: as its standard input, to the end.
fn hand_over(boot: &[u8]) -> io::Result<()> {
    // SAFETY: a name and no flags.
    let message = sys::check(unsafe { libc::memfd_create(c"boot".as_ptr(), 0) })?;
    // SAFETY: just made, and given away below.
    let mut message: File = unsafe { std::os::fd::FromRawFd::from_raw_fd(message) };
    message.write_all(boot)?;
    io::Seek::rewind(&mut message)?;
    sys::check(unsafe { libc::dup2(message.into_raw_fd(), 0) }).map(drop)
}

/// Carry bytes between the agent's connection and the port, one connection after the other. While nobody of the host has the
/// other end open, the agent waits: what it said to nobody would reach the next one.
fn carry(listener: &UnixListener, port: &File) {
    loop {
        while hung_up(port) {
            std::thread::sleep(LOOK_AGAIN);
        }
        let Ok((agent, _)) = listener.accept() else { return };
        if !is_first_process(&agent) {
            continue; // root of the sandbox can find the socket, too
        }
        let outwards = pump(&agent, port);
        let mut chunk = vec![0; 1 << 16];
        while let Ok(n @ 1..) = (&mut &*port).read(&mut chunk) {
            if (&agent).write_all(chunk.get(..n).unwrap_or_default()).is_err() {
                break;
            }
        }
        let _ = agent.shutdown(std::net::Shutdown::Both);
        if let Some(outwards) = outwards {
            let _ = outwards.join();
        }
    }
}

/// Whether the agent is at the other end: nobody else has its number.
fn is_first_process(peer: &UnixStream) -> bool {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = std::mem::size_of::<libc::ucred>() as libc::socklen_t;
    let place = (&raw mut found).cast();
    // SAFETY: the size is that of the place.
    let done = unsafe { libc::getsockopt(peer.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, place, &raw mut size) };
    done == 0 && found.pid == 1
}

fn pump(agent: &UnixStream, port: &File) -> Option<std::thread::JoinHandle<()>> {
    let (mut from, mut to) = (agent.try_clone().ok()?, port.try_clone().ok()?);
    Some(std::thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
    }))
}

fn hung_up(port: &File) -> bool {
    let mut look = libc::pollfd { fd: port.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one entry, which is ours.
    unsafe { libc::poll(&raw mut look, 1, 0) > 0 && look.revents & libc::POLLHUP != 0 }
}

fn mount(source: &str, target: &str, kind: &str, flags: libc::c_ulong, options: &str) -> io::Result<()> {
    if flags != libc::MS_MOVE {
        let _ = fs::create_dir_all(target); // on a read-only root it is there already
    }
    let [source, place, kind, options] = [source, target, kind, options].map(CString::new);
    let (source, place, kind, options) = (source?, place?, kind?, options?);
    // SAFETY: all strings end with NUL.
    let done = unsafe { libc::mount(source.as_ptr(), place.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast()) };
    sys::check(done).map(drop).map_err(|e| io::Error::new(e.kind(), format!("{target}: {e}")))
}
