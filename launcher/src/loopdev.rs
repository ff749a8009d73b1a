//! Loop devices that clear themselves. Two sandboxes that share a disk must share the device too: two devices over one file
//! would be two caches of one file system.

use crate::failure::{Failure, Result};
use crate::sys;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const AUTOCLEAR: u32 = 4;
const ATTEMPTS: usize = 1024;

#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

pub struct Device {
    pub number: i32,
    pub node: String,
    fd: OwnedFd,
}

/// The device over `image` and a descriptor that keeps it from clearing until it is mounted. For a fresh image no device is looked
/// for: that takes longer the more sandboxes there are.
pub fn attach(image: &CStr, fresh: bool) -> Result<Device> {
    let file = sys::open_path(libc::AT_FDCWD, image, libc::O_RDWR | libc::O_NOFOLLOW, "disk")?;
    for _ in 0..ATTEMPTS {
        if !fresh {
            if let Some(found) = find(&file)? {
                return Ok(found);
            }
        }
        match configure(&file) {
            Err(failure) if failure.errno() == Some(libc::EBUSY) => continue, // somebody took that number first
            other => return other,
        }
    }
    Err(Failure::new("disk", "no free loop device".into()))
}

fn configure(file: &OwnedFd) -> Result<Device> {
    let control = sys::open_path(libc::AT_FDCWD, c"/dev/loop-control", libc::O_RDWR, "disk")?;
    // SAFETY: the ioctl takes no argument.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) };
    let number = sys::check(number.into(), "disk", "LOOP_CTL_GET_FREE")?;
    let device = open(number as i32)?;
    // SAFETY: plain data; the kernel copies it.
    let done = unsafe {
        let mut config: Config = std::mem::zeroed();
        config.fd = file.as_raw_fd() as u32;
        config.info.flags = AUTOCLEAR;
        libc::ioctl(device.fd.as_raw_fd(), LOOP_CONFIGURE as _, &config)
    };
    sys::check(done.into(), "disk", "LOOP_CONFIGURE")?;
    Ok(device)
}

/// A device that already serves this very file.
fn find(file: &OwnedFd) -> Result<Option<Device>> {
    let (dev, ino) = identity(file.as_raw_fd())?;
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    let Ok(entries) = std::fs::read_dir("/sys/block") else { return Ok(None) };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(number) = name.strip_prefix("loop").and_then(|n| n.parse().ok()) else { continue };
        // By name first: opening each device of a busy machine takes long. The check of the device itself is what counts.
        let serves = std::fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        // Where the image is on a file system of its own, the name begins at that one's root: the mount is another namespace's.
        let serves = serves.trim_end_matches('\n');
        if serves.is_empty() || !path.to_string_lossy().ends_with(serves) {
            continue;
        }
        let Ok(device) = open(number) else { continue };
        // SAFETY: Info is the kernel's struct loop_info64.
        let serves = unsafe {
            let mut info: Info = std::mem::zeroed();
            libc::ioctl(device.fd.as_raw_fd(), LOOP_GET_STATUS64 as _, &mut info) == 0
                && (info.device, info.inode) == (dev, ino)
        };
        if serves {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

fn identity(fd: RawFd) -> Result<(u64, u64)> {
    // SAFETY: stat is plain data.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        sys::check(libc::fstat(fd, &mut stat).into(), "disk", "fstat")?;
        // loop_info64 carries the device number in the kernel's "huge" encoding, which is glibc's dev_t.
        Ok((stat.st_dev, stat.st_ino))
    }
}

/// Open /dev/loopN; where /dev does not grow nodes by itself, make one in our own tmpfs, which is the working directory.
fn open(number: i32) -> Result<Device> {
    let node = format!("/dev/loop{number}");
    if let Ok(fd) = sys::open_path(libc::AT_FDCWD, sys::c(&node)?.as_c_str(), libc::O_RDWR, "disk") {
        return Ok(Device { number, node, fd });
    }
    let local = format!("loop{number}");
    let node = sys::c(&local)?;
    // SAFETY: node is NUL-terminated.
    unsafe { libc::mknod(node.as_ptr(), libc::S_IFBLK | 0o600, libc::makedev(7, number as u32)) };
    let fd = sys::open_path(libc::AT_FDCWD, &node, libc::O_RDWR, "disk")?;
    Ok(Device { number, node: local, fd })
}
