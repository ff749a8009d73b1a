//! The agent of a pod: how it becomes a sandbox's, and what comes and goes over the network (docs/kubernetes-activation.md).
//!
//! PID 1 has four threads, all of them started before any program of the sandbox, so that a sandbox which uses up its
//! processes cannot keep its gateway out. The main one waits for the activation and then is the agent. `door` speaks TLS and
//! passes plain bytes on, `orders` activates, and `egress` answers names and takes connections on loopback.

mod canary;
mod door;
mod egress;
mod identity;
mod log;
mod orders;
mod tls;

use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

use crate::boot::{self, Boot};
use crate::{start, sys};
use identity::Identity;
use log::Log;

const PORT: u16 = 2024;
const MOST_KEYS: usize = 4;
/// Capabilities that nothing in a pod may have: NET_ADMIN, NET_RAW, SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, PERFMON, BPF.
const NEVER: &[i32] = &[12, 13, 16, 17, 19, 21, 38, 39];
/// For the last words of the agent to be sent.
const LAST_WORDS: Duration = Duration::from_secs(1);
const STACK: usize = 512 * 1024;

/// State that the threads share.
pub struct Shared {
    pub log: Log,
    pub started: Instant,
    pub activated: AtomicBool,
    /// Connections of a known gateway that are open.
    pub known: AtomicUsize,
}

/// A boot message for the main thread, and where it says how it went.
pub struct Handed {
    pub boot: Boot,
    pub done: mpsc::SyncSender<Result<(), String>>,
}

/// Where connections of a known gateway go, by purpose: each end takes descriptors.
pub struct Ways {
    pub orders: OwnedFd,
    pub agent: OwnedFd,
    pub egress: OwnedFd,
}

/// `pod`: the first process of a workload container. Returns its exit status.
pub fn run(args: &[String]) -> i32 {
    boot::protect();
    start::tell(serve(args))
}

/// `install DIRECTORY`: copies this program there as `guest`, for an init container without a shell.
pub fn install(args: &[String]) -> Result<(), String> {
    let [place] = args else { return Err("usage: install DIRECTORY".into()) };
    let place = Path::new(place);
    let fresh = place.join(".guest.new");
    let failed = |e: std::io::Error| format!("{}: {e}", place.display());
    std::fs::copy("/proc/self/exe", &fresh).map_err(failed)?;
    std::fs::set_permissions(&fresh, std::os::unix::fs::PermissionsExt::from_mode(0o755)).map_err(failed)?;
    std::fs::rename(&fresh, place.join("guest")).map_err(failed)
}

fn serve(args: &[String]) -> Result<(), String> {
    let (keys, port) = read_arguments(args)?;
    give_up_rights()?;
    let failed = |e: std::io::Error| e.to_string();
    let null = sys::open(c"/dev/null", libc::O_RDWR).map_err(failed)?;
    sys::check(unsafe { libc::dup2(null.as_raw_fd(), 0) }).map_err(failed)?;
    let identity = Identity::make()?;
    let config = tls::config(&identity, &keys)?;
    let listener = TcpListener::bind(("::", port))
        .or_else(|_| TcpListener::bind(("0.0.0.0", port)))
        .map_err(|e| format!("port {port}: {e}"))?;
    end_on_signals(); // before anybody knows that it is here
    println!("atoll-agent {} {}", env!("CARGO_PKG_VERSION"), identity.fingerprint);
    let shared = Arc::new(Shared {
        log: Log::open()?,
        started: Instant::now(),
        activated: AtomicBool::new(false),
        known: AtomicUsize::new(0),
    });
    let pair = || sys::message_pair().map_err(failed);
    let ((to_orders, orders_end), (to_agent, agent_end), (to_egress, egress_end)) = (pair()?, pair()?, pair()?);
    let ways = Ways { orders: to_orders, agent: to_agent, egress: to_egress };
    let (hand, handed) = mpsc::sync_channel(1);
    let (egress, steering) = egress::prepare().map_err(failed)?;
    let orders = orders::Orders::new(shared.clone(), orders_end, agent_end, hand, steering);
    block_signals(true)?; // of the other threads
    let door = door::Door::new(listener, config, ways, shared.clone()).map_err(failed)?;
    spawn("door", move || door.run())?;
    spawn("orders", move || orders.run())?;
    spawn("egress", move || egress.run(&egress_end))?;
    block_signals(false)?;
    let Handed { boot, done } = handed.recv().map_err(|_| "no activation is possible")?;
    let begun = start::begin(boot);
    shared.activated.store(begun.is_ok(), Ordering::Release);
    let _ = done.send(begun.as_ref().map(|_| ()).map_err(Clone::clone));
    let mut agent = match begun {
        Ok(agent) => agent,
        Err(error) => {
            finish(&shared);
            return Err(error);
        }
    };
    boot::settle();
    agent.run();
    drop(agent);
    finish(&shared);
    Ok(())
}

/// Waits a moment until what was said last is with the gateway.
fn finish(shared: &Shared) {
    let until = Instant::now() + LAST_WORDS;
    while shared.known.load(Ordering::Acquire) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let ended = std::thread::Builder::new().name(name.into()).stack_size(STACK).spawn(move || {
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_err() {
            std::process::exit(1); // an agent that nobody can reach or hold is no sandbox
        }
    });
    ended.map(drop).map_err(|e| format!("thread {name}: {e}"))
}

fn read_arguments(args: &[String]) -> Result<(Vec<[u8; 32]>, u16), String> {
    let (mut keys, mut port) = (Vec::new(), PORT);
    for pair in args.chunks(2) {
        match pair {
            [name, value] if name == "--gateway-key" => {
                keys.push(identity::decode_key(value).ok_or("--gateway-key: not an Ed25519 public key in Base64")?);
            }
            [name, value] if name == "--port" => port = value.parse().map_err(|_| "--port: not a port")?,
            _ => return Err(format!("unknown argument {:?}", pair.first())),
        }
    }
    if keys.is_empty() || keys.len() > MOST_KEYS {
        return Err(format!("from one to {MOST_KEYS} --gateway-key are needed"));
    }
    Ok((keys, port))
}

/// Nobody in this pod may read another process's memory, where the agent's keys are, or change the pod's network.
fn give_up_rights() -> Result<(), String> {
    let failed =
        |e: std::io::Error| format!("rights cannot be given up ({e}): take the capabilities out of the template");
    // SAFETY: numbers, and structures of the kernel's own layout: version and pid; effective, permitted, inheritable, twice.
    unsafe {
        let head = [0x2008_0522u32, 0];
        let mut sets = [0u32; 6];
        sys::check(libc::syscall(libc::SYS_capget, head.as_ptr(), sets.as_mut_ptr()) as i32).map_err(failed)?;
        let before = sets;
        for capability in NEVER {
            if libc::prctl(libc::PR_CAPBSET_READ, *capability, 0, 0, 0) == 1 {
                sys::check(libc::prctl(libc::PR_CAPBSET_DROP, *capability, 0, 0, 0)).map_err(failed)?;
            }
            for set in sets.iter_mut().skip(*capability as usize / 32 * 3).take(3) {
                *set &= !(1 << (capability % 32));
            }
        }
        if sets != before {
            sys::check(libc::syscall(libc::SYS_capset, head.as_ptr(), sets.as_ptr()) as i32).map_err(failed)?;
        }
    }
    Ok(())
}

fn block_signals(block: bool) -> Result<(), String> {
    // SAFETY: a set of this function's own.
    let done = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        let how = if block { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
        libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut())
    };
    (done == 0).then_some(()).ok_or_else(|| "signals cannot be blocked".into())
}

/// Until the agent handles signals itself, a pod that is deleted ends at once. The kernel has no such default for PID 1.
fn end_on_signals() {
    extern "C" fn end(_: libc::c_int) {
        // SAFETY: nothing else is safe here.
        unsafe { libc::_exit(0) }
    }
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: a handler that does one system call.
        unsafe { libc::signal(signal, end as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
}
