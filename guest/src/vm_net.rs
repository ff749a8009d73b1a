//! The network of a virtual machine: its loopback, and the one interface, with the address the host has given it.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::sys;

const NAME: &str = "eth0";
const NO_IPV6: &str = "/proc/sys/net/ipv6/conf/default/disable_ipv6";

/// Bring the loopback up, and the interface if there is an `ADDRESS/PREFIX,GATEWAY` for it.
pub fn start(given: Option<&str>) -> io::Result<()> {
    // SAFETY: no pointers.
    let socket = sys::check(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: just made.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    bring_up(&socket, "lo")?;
    let Some(given) = given else { return Ok(()) };
    let (address, prefix, gateway) = parse(given).ok_or_else(|| io::Error::other(format!("no address: {given}")))?;
    let _ = fs::write(NO_IPV6, "1"); // the host drops it in any case
    let mask = Ipv4Addr::from(u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0));
    set(&socket, libc::SIOCSIFADDR as _, address)?;
    set(&socket, libc::SIOCSIFNETMASK as _, mask)?;
    bring_up(&socket, NAME)?;
    add_default_route(&socket, gateway)
}

fn parse(given: &str) -> Option<(Ipv4Addr, u8, Ipv4Addr)> {
    let (own, gateway) = given.split_once(',')?;
    let (address, prefix) = own.split_once('/')?;
    let prefix = prefix.parse().ok().filter(|bits| *bits <= 32)?;
    Some((address.parse().ok()?, prefix, gateway.parse().ok()?))
}

fn bring_up(socket: &OwnedFd, name: &str) -> io::Result<()> {
    let mut request = request(name);
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as _;
    // SAFETY: the request is whole.
    sys::check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) }).map(drop)
}

fn set(socket: &OwnedFd, what: libc::c_ulong, address: Ipv4Addr) -> io::Result<()> {
    let mut request = request(NAME);
    request.ifr_ifru.ifru_addr = plain(address);
    // SAFETY: as above.
    sys::check(unsafe { libc::ioctl(socket.as_raw_fd(), what as _, &raw const request) }).map(drop)
}

fn add_default_route(socket: &OwnedFd, gateway: Ipv4Addr) -> io::Result<()> {
    const UP_BY_GATEWAY: u16 = 0x1 | 0x2;
    // SAFETY: plain data, of which zero is no value that means anything.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = plain(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = plain(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = plain(gateway);
    route.rt_flags = UP_BY_GATEWAY;
    // SAFETY: the route is whole.
    sys::check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT as _, &raw const route) }).map(drop)
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: plain data.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    request
}

fn plain(address: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: both are plain data of 16 bytes.
    unsafe {
        let mut full: libc::sockaddr_in = std::mem::zeroed();
        full.sin_family = libc::AF_INET as libc::sa_family_t;
        full.sin_addr.s_addr = u32::from(address).to_be();
        std::mem::transmute(full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_whole_or_refused() {
        let good = parse("100.96.0.2/30,100.96.0.1");
        assert_eq!(good, Some((Ipv4Addr::new(100, 96, 0, 2), 30, Ipv4Addr::new(100, 96, 0, 1))));
        for bad in ["", "100.96.0.2/30", "100.96.0.2,100.96.0.1", "100.96.0.2/33,100.96.0.1", "x/30,100.96.0.1"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
