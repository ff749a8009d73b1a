//! Devices a sandbox may open, were it ever to find a node of one: the six that are bound into its /dev, and terminals.
//! By the devices controller of v1 where the sandbox has a group in it, else by a program on its v2 group; without either no sandbox.

use crate::failure::{Failure, Result};
use crate::sys;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

const STEP: &str = "devices";

/// Character devices: null, zero, full, random, urandom, tty; ptmx and all of a devpts.
const OPEN: [(u32, Option<u32>); 8] =
    [(1, Some(3)), (1, Some(5)), (1, Some(7)), (1, Some(8)), (1, Some(9)), (5, Some(0)), (5, Some(2)), (136, None)];

pub fn restrict(doors: &[String], unified: Option<&OwnedFd>) -> Result<()> {
    let groups = doors.iter().filter_map(|door| Path::new(door).parent());
    let mut held = false;
    for group in groups.filter(|group| group.join("devices.deny").exists()) {
        write_rules(group)?;
        held = true;
    }
    match unified {
        _ if held => Ok(()),
        Some(group) => attach(group),
        None => Err(Failure::new(STEP, "nothing here can hold devices back".into())),
    }
}

fn write_rules(group: &Path) -> Result<()> {
    let failed = |rule: &str, e: std::io::Error| Failure::new(STEP, format!("{rule}: {e}"));
    std::fs::write(group.join("devices.deny"), "a").map_err(|e| failed("deny a", e))?;
    let mut file = std::fs::File::create(group.join("devices.allow")).map_err(|e| failed("devices.allow", e))?;
    // Making a node needs a capability that no sandbox has; opening it is what is refused.
    let mut rules = vec!["c *:* m".to_string(), "b *:* m".to_string()];
    rules.extend(OPEN.map(|(major, minor)| match minor {
        Some(minor) => format!("c {major}:{minor} rwm"),
        None => format!("c {major}:* rwm"),
    }));
    rules.iter().try_for_each(|rule| file.write_all(rule.as_bytes()).map_err(|e| failed(rule, e)))
    // one rule for each write
}

// The program for v2, of the kernel's kind for devices: its argument is struct { u32 access << 16 | type, major, minor }.

const LOAD_WORD: u8 = 0x61; // BPF_LDX | BPF_MEM | BPF_W
const MOVE: u8 = 0xb7; // BPF_ALU64 | BPF_MOV | BPF_K
const COPY: u8 = 0xbf; // BPF_ALU64 | BPF_MOV | BPF_X
const AND: u8 = 0x57; // BPF_ALU64 | BPF_AND | BPF_K
const SHIFT: u8 = 0x77; // BPF_ALU64 | BPF_RSH | BPF_K
const IF_EQUAL: u8 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const UNLESS: u8 = 0x55; // BPF_JMP | BPF_JNE | BPF_K
const EXIT: u8 = 0x95; // BPF_JMP | BPF_EXIT
const CHARACTER: i32 = 2;
const MAKE_NODE: i32 = 1;

fn step(code: u8, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    let registers = u64::from(to) | u64::from(from) << 4;
    u64::from(code) | registers << 8 | u64::from(offset as u16) << 16 | u64::from(value as u32) << 32
}

fn program() -> Vec<u64> {
    let mut steps = vec![
        step(LOAD_WORD, 2, 1, 0, 0),
        step(LOAD_WORD, 4, 1, 4, 0),
        step(LOAD_WORD, 5, 1, 8, 0),
        step(COPY, 3, 2, 0, 0),
        step(AND, 2, 0, 0, 0xffff),
        step(SHIFT, 3, 0, 0, 16),
        // From here: 2 type, 3 access, 4 major, 5 minor; 0 is the answer.
        step(MOVE, 0, 0, 0, 1),
        step(UNLESS, 3, 0, 1, MAKE_NODE),
        step(EXIT, 0, 0, 0, 0),
        step(MOVE, 0, 0, 0, 0),
        step(IF_EQUAL, 2, 0, 1, CHARACTER),
        step(EXIT, 0, 0, 0, 0),
    ];
    for (major, minor) in OPEN {
        let (major, skip) = (major as i32, if minor.is_some() { 3 } else { 2 });
        steps.push(step(UNLESS, 4, 0, skip, major));
        if let Some(minor) = minor {
            steps.push(step(UNLESS, 5, 0, 2, minor as i32));
        }
        steps.extend([step(MOVE, 0, 0, 0, 1), step(EXIT, 0, 0, 0, 0)]);
    }
    steps.push(step(EXIT, 0, 0, 0, 0));
    steps
}

fn attach(group: &OwnedFd) -> Result<()> {
    const PROG_LOAD: i32 = 5;
    const PROG_ATTACH: i32 = 8;
    const KIND_DEVICE: u32 = 15; // BPF_PROG_TYPE_CGROUP_DEVICE
    const ATTACH_DEVICE: u32 = 6; // BPF_CGROUP_DEVICE
    const ALLOW_MULTI: u32 = 2;
    let steps = program();
    let mut load = [0u64; 16];
    load[0] = u64::from(KIND_DEVICE) | (steps.len() as u64) << 32;
    load[1] = steps.as_ptr() as u64;
    load[2] = c"Apache-2.0".as_ptr() as u64;
    // SAFETY: the layouts are the kernel's union bpf_attr for these two commands, zero where nothing is said.
    unsafe {
        let loaded = libc::syscall(libc::SYS_bpf, PROG_LOAD, load.as_ptr(), std::mem::size_of_val(&load));
        let loaded = sys::owned(loaded, STEP, "bpf(load)")?;
        let order = [group.as_raw_fd() as u32, loaded.as_raw_fd() as u32, ATTACH_DEVICE, ALLOW_MULTI];
        let done = libc::syscall(libc::SYS_bpf, PROG_ATTACH, order.as_ptr(), std::mem::size_of_val(&order));
        sys::check(done, STEP, "bpf(attach)").map(|_| ())
    }
}
