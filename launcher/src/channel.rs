//! The socket to the daemon on fd 0: one message per packet, descriptors by SCM_RIGHTS.

use crate::failure::{Failure, Result};
use crate::sys;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const MAX_FDS: usize = 64;
const MAX_MESSAGE: usize = 256 * 1024;

/// Answer the daemon. One that is gone needs no answer.
pub fn send(text: &str, fd: Option<&OwnedFd>) {
    let mut control = [0u64; 8];
    // SAFETY: all pointers are into live locals, and the control buffer is aligned and larger than CMSG_SPACE(4).
    unsafe {
        let mut iov = libc::iovec { iov_base: text.as_ptr() as *mut _, iov_len: text.len() };
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut iov;
        message.msg_iovlen = 1;
        if let Some(fd) = fd {
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(4) as _;
            let head = libc::CMSG_FIRSTHDR(&message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(head).cast::<i32>().write_unaligned(fd.as_raw_fd());
        }
        libc::sendmsg(0, &message, libc::MSG_NOSIGNAL);
    }
}

/// The sandbox's tree is made; `device` is the number of the loop device under it.
pub fn mounted(device: Option<i32>) {
    let device = device.map_or("null".to_string(), |number| number.to_string());
    send(&format!("{{\"mounted\":true,\"loop\":{device}}}"), None);
}

/// The next message with its descriptors; None when the daemon has closed its end.
pub fn receive() -> Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut text = vec![0u8; MAX_MESSAGE];
    let mut control = [0u64; 8 + MAX_FDS];
    // SAFETY: as above; received descriptors are owned by nobody else.
    unsafe {
        let mut iov = libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: text.len() };
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = std::mem::size_of_val(&control) as _;
        let got = loop {
            let got = libc::recvmsg(0, &mut message, libc::MSG_CMSG_CLOEXEC);
            if got >= 0 {
                break got as usize;
            }
            if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
                return Err(Failure::last("channel", "recvmsg"));
            }
        };
        let mut fds = Vec::new();
        let mut head = libc::CMSG_FIRSTHDR(&message);
        while !head.is_null() {
            if (*head).cmsg_level == libc::SOL_SOCKET && (*head).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*head).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(head).cast::<i32>();
                for i in 0..bytes / 4 {
                    fds.push(sys::lift(OwnedFd::from_raw_fd(data.add(i).read_unaligned()))?);
                }
            }
            head = libc::CMSG_NXTHDR(&message, head);
        }
        if got == 0 {
            return Ok(None);
        }
        if message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
            return Err(Failure::new("channel", "the start message is too long".into()));
        }
        text.truncate(got);
        Ok(Some((text, fds)))
    }
}
