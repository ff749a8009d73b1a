//! atoll-launch: makes one sandbox's namespaces and mounts where nobody else sees them, then becomes its engine.
//!
//! Two phases over a SOCK_SEQPACKET socket on fd 0, one JSON object per message. `prepare` runs at once: user and network
//! namespace are made, `{"ready": true}` goes out with the network namespace as a descriptor, and the process waits; it may
//! wait long, that is how namespaces are made ahead of time. A `start` message then brings the mounts and, as descriptors,
//! the boot message, the boot log, the agent's listening socket and the sources of binds. EOF ends the process. Whatever
//! happens, everything made here belongs to this process alone, so the kernel takes it away with the process.

mod channel;
mod devices;
mod direct;
mod failure;
mod groups;
mod jail;
mod keeper;
mod layout;
mod loopdev;
mod machine;
mod mounts;
mod namespaces;
mod oci;
mod order;
mod rights;
mod sys;
mod tree;
mod view;

use failure::{Failure, Result};
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

/// Where the engine finds what it inherits. `HANDED` is the agent's listening socket, the only one passed on into the sandbox
/// (`--preserve-fds 1`). An engine inside the sandbox's own namespaces gets none of them.
const HANDED: i32 = 3;
const USER_NS: i32 = 4;
const NET_NS: i32 = 5;

fn main() {
    let code = match run() {
        Ok(()) => 0,
        Err(failure) => {
            channel::send(&failure.to_json(), None);
            1
        }
    };
    std::process::exit(code);
}

fn run() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let base = number(args.next())?;
    let count = number(args.next())?;
    sys::die_with_parent()?;
    sys::detach_from_terminal();
    let spaces = namespaces::make(base, count)?;
    channel::send("{\"ready\":true}", Some(&spaces.net));
    let Some((text, fds)) = channel::receive()? else { return Ok(()) };
    let order = order::parse(&text)?;
    if let Some(direct) = &order.direct {
        return start_directly(&order, direct, base, count, spaces, &fds);
    }
    let device = layout::build(&order, base, count, &spaces.user, &fds)?;
    if order.inside.is_none() {
        groups::enter_waiting(&order.groups)?;
    }
    if let Some(config) = &order.inside {
        groups::go_on_inside(&order.groups)?;
        layout::write_bundle(config, base)?;
        if let Some(seen) = &order.seen {
            machine::write(seen)?;
        }
        namespaces::enter(&spaces)?;
        mounts::own_namespace()?; // one that the sandbox's root owns, else the engine could not mount in it
        mounts::chdir(&sys::c(&order.stage)?)?;
    }
    sys::die_with_parent()?; // again: the kernel forgets it when ids change, as they do to open a user's files
    channel::mounted(device);
    if order.inside.is_none() {
        return become_engine(&order, spaces, &fds);
    }
    let file = fds.get(2).ok_or_else(|| Failure::new("order", "no file for the process id".into()))?;
    let engine = || {
        if let Some(seen) = &order.seen {
            machine::show(seen);
        }
        become_engine(&order, spaces, &fds)
    };
    let status = keeper::start(engine, order.jail.is_some(), file)?;
    std::process::exit(status)
}

/// Without an engine's program. The configuration is read first: what it asks for and we do not know is refused while nothing is made.
fn start_directly(
    order: &order::Start,
    direct: &order::Direct,
    base: u32,
    count: u32,
    spaces: namespaces::Spaces,
    fds: &[OwnedFd],
) -> Result<()> {
    let config = oci::parse(&direct.config, base, count, &order.stage)?;
    let filter = rights::parse(&direct.filter)?;
    let file = fds.get(direct.pid_file).ok_or_else(|| Failure::new("order", "no file for the process id".into()))?;
    let device = layout::build(order, base, count, &spaces.user, fds)?;
    sys::die_with_parent()?; // again: the kernel forgets it when ids change, as they do to open a user's files
    let birth = direct::Birth { config: &config, filter: &filter, spaces, fds };
    direct::start(order, &birth, file)?;
    channel::mounted(device);
    Ok(())
}

fn number(arg: Option<String>) -> Result<u32> {
    arg.and_then(|a| a.parse().ok()).ok_or_else(|| Failure::new("usage", "usage: atoll-launch BASE COUNT".into()))
}

/// Give the engine one of the descriptors as this number; the next number.
fn pass(fds: &[OwnedFd], index: usize, at: i32) -> Result<i32> {
    let fd = fds.get(index).ok_or_else(|| Failure::new("order", format!("no descriptor {index}")))?;
    sys::place(fd.as_raw_fd(), at)?;
    Ok(at + 1)
}

/// Put the descriptors where the engine expects them and exec it. Returns only if that failed.
fn become_engine(order: &order::Start, spaces: namespaces::Spaces, fds: &[OwnedFd]) -> Result<()> {
    let argv = order.argv.iter().map(|a| CString::new(a.as_bytes())).collect::<std::result::Result<Vec<_>, _>>();
    let argv = argv.map_err(|_| Failure::new("engine", "NUL in the engine's arguments".into()))?;
    let env: Vec<CString> = order.env.iter().filter_map(|e| CString::new(e.as_bytes()).ok()).collect();
    let filter = order.filter.as_deref().map(rights::parse).transpose()?;
    let [boot, log, handed, ..] = fds else {
        return Err(Failure::new("order", "descriptors for the engine are missing".into()));
    };
    // Everything we hold is above 16 (see `sys::lift`), so none of these dup2 calls overwrites another's source.
    sys::place(boot.as_raw_fd(), 0)?;
    sys::place(log.as_raw_fd(), 1)?;
    sys::place(log.as_raw_fd(), 2)?;
    if order.inside.is_none() {
        sys::place(handed.as_raw_fd(), HANDED)?;
        sys::place(spaces.user.as_raw_fd(), USER_NS)?;
        sys::place(spaces.net.as_raw_fd(), NET_NS)?;
        sys::close_from(NET_NS + 1)?;
    } else {
        let passed = order.jail.as_deref().unwrap_or_default();
        let after = passed.iter().try_fold(HANDED, |at, index| pass(fds, *index, at))?;
        sys::close_from(after)?;
    }
    std::mem::forget(spaces);
    if order.jail.is_some() {
        if let Err(failure) = jail::enter() {
            eprintln!("{}", failure.to_json());
            std::process::exit(126)
        }
    }
    if let Some(filter) = filter {
        rights::install(&filter)?;
    }
    let error = sys::exec(&argv, &env);
    // The channel is gone by now: the log is where this is read.
    eprintln!("cannot run {}: {error}", order.argv.first().map_or("", String::as_str));
    std::process::exit(127)
}
