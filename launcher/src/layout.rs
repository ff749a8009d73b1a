//! Puts the sandbox's tree together: disk, overlays, binds. Runs in a mount namespace nobody else is in.

use crate::failure::{Failure, Result};
use crate::mounts;
use crate::order::{Bind, Disk, Overlay, Source, Start};
use crate::{loopdev, namespaces, sys, view};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const DISK: &str = "disk";
const SHIFTED: &str = "shifted";
const MEMORY: &std::ffi::CStr = c"memory";
const OVERLAY_OPTIONS: &str = "index=off,metacopy=off,redirect_dir=nofollow";

/// The number of the loop device under the sandbox's disk, where it has one.
pub fn build(order: &Start, base: u32, count: u32, user_ns: &OwnedFd, fds: &[OwnedFd]) -> Result<Option<i32>> {
    // A descriptor opened in the host's mount namespace can be cloned only from there: sources first, then our own namespace.
    let shifted = order.shift.then_some(user_ns);
    let lowers = order.overlays.iter().map(|o| lower_trees(o, shifted)).collect::<Result<Vec<_>>>()?;
    let sources = order.binds.iter().map(|b| given_source(b, fds, order.shift)).collect::<Result<Vec<_>>>()?;
    let memory = order.memory.map(|index| saved_memory(index, fds, shifted)).transpose()?;
    mounts::own_namespace()?;
    stage(&order.stage)?;
    let mut disks = Disks::new(&order.disk)?;
    let place = match order.disk {
        Disk::Image { of: Some(of), .. } if of != base => {
            disks.shift(&namespaces::range(of, base, count)?)?;
            SHIFTED
        }
        _ => DISK,
    };
    for (overlay, trees) in order.overlays.iter().zip(&lowers) {
        mount_overlay(overlay, trees, base, place, disks.own(), order.shift)?;
    }
    if let Some(tree) = memory {
        sys::mkdir(libc::AT_FDCWD, MEMORY, 0o700, "memory")?;
        let on = sys::open_path(libc::AT_FDCWD, MEMORY, libc::O_PATH, "memory")?;
        mounts::attach(&tree, on.as_raw_fd())?;
    }
    let root = sys::open_path(libc::AT_FDCWD, c"root", libc::O_PATH | libc::O_DIRECTORY, "mount")?;
    for (bind, source) in order.binds.iter().zip(sources) {
        let tree = match source {
            Some(tree) => tree,
            None => match &bind.source {
                Source::Device(path) => device(path, base)?,
                other => disks.directory(other)?,
            },
        };
        match bind.source {
            Source::Host { uid, gid, .. } if order.shift => {
                mounts::restrict(&tree, bind.read_only, Some(&namespaces::translation(uid, gid, base)?))?;
            }
            Source::Device(_) => {}
            _ => mounts::restrict(&tree, bind.read_only, if bind.idmap { shifted } else { None })?,
        }
        let target = mountpoint(root.as_raw_fd(), &bind.target, base, is_directory(&tree)?)?;
        mounts::attach(&tree, target.as_raw_fd())?;
    }
    for name in &order.mountpoints {
        mountpoint(root.as_raw_fd(), name, base, true)?;
    }
    if let Some(seen) = order.seen.as_ref().filter(|_| order.inside.is_none()) {
        view::make(seen)?;
    }
    if order.read_only_root {
        for overlay in &order.overlays {
            let path = sys::c(&format!("root/{}", overlay.target))?;
            mounts::restrict(&sys::open_path(libc::AT_FDCWD, &path, libc::O_PATH, "mount")?, true, None)?;
        }
    }
    mounts::seal(&sys::c(&order.stage)?)?;
    Ok(disks.device)
}

/// For an engine without rights on the host: its bundle and its state, in our own tmpfs, where only this sandbox's engine looks.
pub fn write_bundle(config: &str, base: u32) -> Result<()> {
    for name in [c"bundle", c"state"] {
        sys::mkdir(libc::AT_FDCWD, name, 0o700, "bundle")?;
    }
    std::fs::write("bundle/config.json", config).map_err(|e| Failure::new("bundle", e.to_string()))?;
    for name in [c"bundle/config.json", c"bundle", c"state"] {
        sys::chown(libc::AT_FDCWD, name, base, "bundle")?;
    }
    Ok(())
}

/// A tmpfs to work in. It is traversable by all: the engine's init walks through it with the sandbox's own id.
fn stage(path: &str) -> Result<()> {
    let path = sys::c(path)?;
    // Not through mounts::mount(): a loop device node may have to live here, and this tmpfs is not part of the sandbox.
    // SAFETY: all strings are NUL-terminated.
    let done = unsafe {
        libc::mount(
            c"atoll".as_ptr(),
            path.as_ptr(),
            c"tmpfs".as_ptr(),
            libc::MS_NOSUID,
            c"mode=0711,size=1m".as_ptr().cast(),
        )
    };
    sys::check(done.into(), "mount", format!("tmpfs on {}", path.to_string_lossy()))?;
    mounts::chdir(&path)?;
    sys::mkdir(libc::AT_FDCWD, c"root", 0o755, "mount").map(|_| ())
}

fn lower_trees(overlay: &Overlay, user_ns: Option<&OwnedFd>) -> Result<Vec<OwnedFd>> {
    let one = |path: &String| {
        let tree = mounts::clone_tree(libc::AT_FDCWD, &sys::c(path)?)?;
        mounts::restrict(&tree, true, user_ns)?;
        Ok(tree)
    };
    overlay.lowers.iter().map(one).collect()
}

/// The directory of a saved memory, whose files belong to the host's root, as one of the sandbox's root that can only be read.
fn saved_memory(index: usize, fds: &[OwnedFd], shifted: Option<&OwnedFd>) -> Result<OwnedFd> {
    let fd = fds.get(index).ok_or_else(|| Failure::new("order", format!("no descriptor {index}")))?;
    let tree = mounts::clone_tree(fd.as_raw_fd(), c"")?;
    mounts::restrict(&tree, true, shifted)?;
    Ok(tree)
}

/// Mounts that can be cloned only before we leave the host's mount namespace.
fn given_source(bind: &Bind, fds: &[OwnedFd], shift: bool) -> Result<Option<OwnedFd>> {
    match &bind.source {
        Source::Fd(index) => {
            let fd = fds.get(*index).ok_or_else(|| Failure::new("order", format!("no descriptor {index}")))?;
            mounts::clone_tree(fd.as_raw_fd(), c"").map(Some)
        }
        Source::Host { path, uid, gid } => {
            let open = || mounts::open_plain(libc::AT_FDCWD, &sys::c(path)?, "bind");
            // Without shifting there is one user only, and that is us.
            let fd = if shift { sys::as_user(*uid, *gid, open)? } else { open()? };
            let mode = sys::mode(&fd)? & libc::S_IFMT;
            if mode != libc::S_IFDIR && mode != libc::S_IFREG {
                return Err(Failure::new("bind", format!("{path} is neither a directory nor a regular file")));
            }
            mounts::clone_tree(fd.as_raw_fd(), c"").map(Some)
        }
        Source::Disk(_) | Source::Image { .. } | Source::Device(_) => Ok(None),
    }
}

/// A node of our own for a device of the host, which the sandbox's root may open.
fn device(path: &str, base: u32) -> Result<OwnedFd> {
    let given = sys::open_path(libc::AT_FDCWD, &sys::c(path)?, libc::O_PATH | libc::O_NOFOLLOW, "device")?;
    let (major, minor) = sys::device(&given)?.ok_or_else(|| Failure::new("device", format!("{path} is no device")))?;
    let name = sys::c(&format!("device-{major}-{minor}"))?;
    let number = libc::makedev(major, minor);
    // SAFETY: name is NUL-terminated.
    let made = unsafe { libc::mknodat(libc::AT_FDCWD, name.as_ptr(), libc::S_IFCHR | 0o600, number) };
    sys::check(made.into(), "device", path)?;
    sys::chown(libc::AT_FDCWD, &name, base, "device")?;
    mounts::clone_tree(libc::AT_FDCWD, &name)
}

/// The file systems behind the sandbox: its own disk, and those of sandboxes whose workspace it shares.
struct Disks {
    own: OwnedFd,
    device: Option<i32>,
    others: HashMap<String, OwnedFd>,
}

impl Disks {
    fn new(disk: &Disk) -> Result<Self> {
        sys::mkdir(libc::AT_FDCWD, c"disk", 0o700, "disk")?;
        let device = match disk {
            Disk::Image { image, fresh, .. } => mount_image(image, *fresh, "disk")?,
            Disk::Tmpfs(size) => {
                // Files without bytes take memory too: as many as an ext4 of that size would have.
                let options = sys::c(&format!("mode=0700,size={size},nr_inodes={}", (size / 16384).max(1024)))?;
                mounts::mount(c"atoll", c"disk", c"tmpfs", 0, &options)?;
                None
            }
        };
        let own = sys::open_path(libc::AT_FDCWD, c"disk", libc::O_RDONLY | libc::O_DIRECTORY, "disk")?;
        Ok(Disks { own, device, others: HashMap::new() })
    }

    fn own(&self) -> RawFd {
        self.own.as_raw_fd()
    }

    /// Mount the disk a second time, where files with ids of another sandbox have those of this one.
    fn shift(&self, ids: &OwnedFd) -> Result<()> {
        let tree = mounts::clone_tree(self.own.as_raw_fd(), c"")?;
        mounts::restrict(&tree, false, Some(ids))?;
        sys::mkdir(libc::AT_FDCWD, c"shifted", 0o700, "disk")?;
        let on = sys::open_path(libc::AT_FDCWD, c"shifted", libc::O_PATH, "disk")?;
        mounts::attach(&tree, on.as_raw_fd())
    }

    /// A detached mount of one directory of a disk. Its root belongs to id 0, plain: idmapping shifts it per sandbox.
    fn directory(&mut self, source: &Source) -> Result<OwnedFd> {
        let (disk, name) = match source {
            Source::Disk(name) => (self.own.as_raw_fd(), name),
            Source::Image { image, directory } => (self.other(image)?, directory),
            Source::Fd(_) | Source::Device(_) | Source::Host { .. } => {
                return Err(Failure::new("order", "not a directory of a disk".into()))
            }
        };
        let name = plain_name(name)?;
        sys::mkdir(disk, &name, 0o755, "disk")?;
        mounts::clone_tree(disk, &name)
    }

    fn other(&mut self, image: &str) -> Result<RawFd> {
        if !self.others.contains_key(image) {
            let place = format!("disk{}", self.others.len());
            let path = sys::c(&place)?;
            sys::mkdir(libc::AT_FDCWD, &path, 0o700, "disk")?;
            mount_image(image, false, &place)?;
            let disk = sys::open_path(libc::AT_FDCWD, &path, libc::O_RDONLY | libc::O_DIRECTORY, "disk")?;
            self.others.insert(image.to_string(), disk);
        }
        self.others.get(image).map(AsRawFd::as_raw_fd).ok_or_else(|| Failure::new("disk", image.to_string()))
    }
}

/// A disk image, or a directory where those cannot be mounted: then there is no device.
fn mount_image(image: &str, fresh: bool, place: &str) -> Result<Option<i32>> {
    let path = sys::c(image)?;
    let found = sys::open_path(libc::AT_FDCWD, &path, libc::O_PATH | libc::O_NOFOLLOW, "disk")?;
    if is_directory(&found)? {
        let tree = mounts::clone_tree(found.as_raw_fd(), c"")?;
        mounts::restrict(&tree, false, None)?;
        let on = sys::open_path(libc::AT_FDCWD, &sys::c(place)?, libc::O_PATH, "disk")?;
        mounts::attach(&tree, on.as_raw_fd())?;
        return Ok(None);
    }
    let device = loopdev::attach(&path, fresh)?;
    mounts::mount(&sys::c(&device.node)?, &sys::c(place)?, c"ext4", libc::MS_NOATIME, c"")?;
    Ok(Some(device.number))
}

/// A single component: an order can not reach beside the disk.
fn plain_name(name: &str) -> Result<std::ffi::CString> {
    if name.is_empty() || name == "." || name == ".." || name.contains('/') {
        return Err(Failure::new("order", format!("{name:?} is not a plain name")));
    }
    sys::c(name)
}

/// `place` is where the disk shows the ids of this sandbox.
fn mount_overlay(
    overlay: &Overlay,
    trees: &[OwnedFd],
    base: u32,
    place: &str,
    disk: RawFd,
    privileged: bool,
) -> Result<()> {
    plain_name(&overlay.name)?;
    let (upper, work) = (format!("upper-{}", overlay.name), format!("work-{}", overlay.name));
    for (name, owner) in [(&upper, base), (&work, 0)] {
        let name = sys::c(name)?;
        if sys::mkdir(disk, &name, 0o755, "disk")? {
            sys::chown(disk, &name, owner, "disk")?;
        }
    }
    let mut stack = Vec::new();
    for (index, tree) in trees.iter().enumerate() {
        let lower = format!("{}{index}", overlay.name);
        let path = sys::c(&lower)?;
        sys::mkdir(libc::AT_FDCWD, &path, 0o700, "mount")?;
        let on = sys::open_path(libc::AT_FDCWD, &path, libc::O_PATH, "mount")?;
        mounts::attach(tree, on.as_raw_fd())?;
        stack.push(lower);
    }
    // Only real root may write trusted attributes; others keep overlay's notes in attributes of a user.
    let attributes = if privileged { "" } else { ",userxattr" };
    let stack = stack.join(":");
    let options =
        format!("lowerdir={stack},upperdir={place}/{upper},workdir={place}/{work},{OVERLAY_OPTIONS}{attributes}");
    let target = if overlay.target.is_empty() {
        sys::c("root")?
    } else {
        let root = sys::open_path(libc::AT_FDCWD, c"root", libc::O_PATH | libc::O_DIRECTORY, "mount")?;
        let name = plain_name(&overlay.target)?;
        mountpoint(root.as_raw_fd(), &overlay.target, base, true)?;
        sys::c(&format!("root/{}", name.to_string_lossy()))?
    };
    mounts::mount(c"overlay", &target, c"overlay", libc::MS_NOATIME, &sys::c(&options)?)
}

fn is_directory(tree: &OwnedFd) -> Result<bool> {
    Ok(sys::mode(tree)? & libc::S_IFMT == libc::S_IFDIR)
}

/// Open the place to mount on, making what is missing. The tree may be an earlier sandbox's own work, so nothing in it is trusted:
/// a link on the way is refused, and what is there must be of the kind that is needed.
fn mountpoint(root: RawFd, path: &str, base: u32, directory: bool) -> Result<OwnedFd> {
    let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
    if parts.is_empty() || parts.iter().any(|p| *p == "." || *p == "..") {
        return Err(Failure::new("order", format!("{path:?} is not a mount point")));
    }
    let mut here = mounts::open_inside(root, c".")?;
    for (index, part) in parts.iter().enumerate() {
        let name = sys::c(part)?;
        let last = index + 1 == parts.len();
        if !last || directory {
            if sys::mkdir(here.as_raw_fd(), &name, 0o755, "mountpoint")? {
                sys::chown(here.as_raw_fd(), &name, base, "mountpoint")?;
            }
        } else {
            let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
            match sys::open_path(here.as_raw_fd(), &name, flags, "mountpoint") {
                Err(failure) if failure.errno() == Some(libc::EEXIST) => {}
                made => drop(made?),
            }
        }
        here = mounts::open_inside(here.as_raw_fd(), &name)?;
        if is_directory(&here)? != (!last || directory) {
            return Err(Failure::new("mountpoint", format!("/{path}: {part} is not of the kind needed here")));
        }
    }
    Ok(here)
}
