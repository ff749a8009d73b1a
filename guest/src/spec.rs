//! The order of a shim, and its way from the agent to a spare shim: bytes and descriptors over a socket.

use std::ffi::CString;
use std::io;
use std::os::fd::{OwnedFd, RawFd};

/// A longer spec does not fit into a socket buffer and goes through a fresh fork instead.
pub const LONGEST: usize = 64 * 1024;

/// A program to start. Everything is resolved: the shim looks nothing up.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Paths to try in order, as execvp would.
    pub programs: Vec<CString>,
    pub argv: Vec<CString>,
    /// The shell that gets the command if none of the programs starts: its path, and its arguments. Often nothing.
    pub otherwise: Vec<CString>,
    pub env: Vec<CString>,
    /// uid, gid and supplementary groups to take on.
    pub user: Option<(u32, u32, Vec<u32>)>,
    pub umask: u32,
    pub rlimits: Vec<(u32, u64, u64)>,
    pub pty: bool,
}

/// stdin, stdout, stderr and working directory of the process, in this order.
pub type SpecFds = [OwnedFd; 4];

/// The spec as bytes, its length in front.
pub fn encode(spec: &Spec) -> Vec<u8> {
    let mut out = vec![0; 4];
    let word = |out: &mut Vec<u8>, n: u64| out.extend_from_slice(&n.to_ne_bytes());
    for list in [&spec.programs, &spec.argv, &spec.otherwise, &spec.env] {
        word(&mut out, list.len() as u64);
        for text in list {
            out.extend_from_slice(text.as_bytes_with_nul());
        }
    }
    let (uid, gid, groups) = spec.user.clone().unwrap_or_default();
    word(&mut out, u64::from(spec.user.is_some()));
    word(&mut out, uid.into());
    word(&mut out, gid.into());
    word(&mut out, groups.len() as u64);
    for group in groups {
        word(&mut out, group.into());
    }
    word(&mut out, spec.umask.into());
    word(&mut out, spec.pty.into());
    word(&mut out, spec.rlimits.len() as u64);
    for (resource, soft, hard) in &spec.rlimits {
        word(&mut out, (*resource).into());
        word(&mut out, *soft);
        word(&mut out, *hard);
    }
    let length = (out.len() - 4) as u32;
    if let Some(front) = out.first_chunk_mut::<4>() {
        *front = length.to_ne_bytes();
    }
    out
}

fn decode(raw: &[u8]) -> Option<Spec> {
    let mut rest = raw;
    let word = |rest: &mut &[u8]| {
        let (bytes, tail) = rest.split_first_chunk::<8>()?;
        *rest = tail;
        Some(u64::from_ne_bytes(*bytes))
    };
    let list = |rest: &mut &[u8]| {
        let count = word(rest)?;
        let mut out = Vec::new();
        for _ in 0..count {
            let text = std::ffi::CStr::from_bytes_until_nul(rest).ok()?;
            *rest = rest.get(text.to_bytes_with_nul().len()..)?;
            out.push(text.to_owned());
        }
        Some(out)
    };
    let (programs, argv) = (list(&mut rest)?, list(&mut rest)?);
    let (otherwise, env) = (list(&mut rest)?, list(&mut rest)?);
    let has_user = word(&mut rest)? == 1;
    let (uid, gid) = (word(&mut rest)? as u32, word(&mut rest)? as u32);
    let groups = (0..word(&mut rest)?).map(|_| word(&mut rest).map(|g| g as u32)).collect::<Option<Vec<_>>>()?;
    let (umask, pty) = (word(&mut rest)? as u32, word(&mut rest)? == 1);
    let rlimits = (0..word(&mut rest)?)
        .map(|_| Some((word(&mut rest)? as u32, word(&mut rest)?, word(&mut rest)?)))
        .collect::<Option<Vec<_>>>()?;
    Some(Spec { programs, argv, otherwise, env, user: has_user.then_some((uid, gid, groups)), umask, rlimits, pty })
}

#[repr(C, align(8))]
struct ControlBuffer([u8; 64]);

/// Sends bytes with up to four descriptors; all at once or not at all.
pub fn send(socket: RawFd, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let fds = fds.get(..fds.len().min(4)).unwrap_or_default();
    let mut control = ControlBuffer([0; 64]);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let size = std::mem::size_of_val(fds) as u32;
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size) as _;
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        if !head.is_null() {
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(size) as _;
            std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(head).cast::<RawFd>(), fds.len());
        }
        libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    match usize::try_from(sent) {
        Ok(n) if n == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Waits for a spec. `None` when the agent has gone.
pub fn receive(socket: RawFd) -> Option<(Spec, SpecFds)> {
    let mut data = vec![0u8; LONGEST + 4];
    let mut fds: Vec<OwnedFd> = Vec::new();
    let mut got = 0;
    loop {
        let length = data.first_chunk::<4>().map_or(0, |b| u32::from_ne_bytes(*b) as usize);
        if got >= 4 && got >= length + 4 {
            let spec = decode(data.get(4..4 + length)?)?;
            return Some((spec, SpecFds::try_from(fds).ok()?));
        }
        let mut control = ControlBuffer([0; 64]);
        let room = data.get_mut(got..)?;
        let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = 64;
            let count = libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC);
            if count < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) {
                continue;
            }
            if count <= 0 {
                return None;
            }
            got += count as usize;
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            if !head.is_null() && (*head).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*head).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                for i in 0..bytes / 4 {
                    let fd = libc::CMSG_DATA(head).cast::<RawFd>().add(i).read_unaligned();
                    fds.push(std::os::fd::FromRawFd::from_raw_fd(fd));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_survives_the_way_to_the_spare() {
        let text = |s: &str| CString::new(s).unwrap();
        let spec = Spec {
            programs: vec![text("/bin/x")],
            argv: vec![text("x"), text(""), text("a b")],
            otherwise: vec![text("/bin/bash"), text("-c")],
            env: vec![text("A=1")],
            user: Some((1, 2, vec![3, 4])),
            umask: 0o27,
            rlimits: vec![(7, 10, u64::MAX)],
            pty: true,
        };
        assert_eq!(decode(&encode(&spec)[4..]), Some(spec));
    }
}
