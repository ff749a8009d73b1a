# The warm Python of a sandbox. The agent starts `python3 -c` with one line that executes this text, so `__main__`, flags,
# paths and loaded modules are those of any other start. From then on this process only forks: a child that becomes the
# native shim, and below it the spare, which waits for one request and then is the program that was asked for.
#
# Code runs the way the interpreter itself would run it. The exception that ends this text is handed by C to
# `sys.excepthook`, which is the C function that runs a command or a file: no frame of ours is below the program.
import os
import posix
import site
import sys

CODE = b"-c"
UNSUPPORTED, STALE = 3, 4
kept = []
IGNORE_COOKIE = 0x800
POPULATE_READ, POPULATE_WRITE = 22, 23
MOST_PAGES = 32 << 20


def clean_import(names):
    """Modules this needs and a fresh interpreter has not got; nobody sees that they were loaded."""
    modules, finders = set(sys.modules), dict(sys.path_importer_cache)
    found = [__import__(name) for name in names]
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.path_importer_cache.clear()
    sys.path_importer_cache.update(finders)
    return found


# `python3 -c` looks for modules in the working directory first. Until there is a program that asks for one, what somebody has put
# there (a sub-agent, a project, a snapshot) is not to be run.
WITH_DIRECTORY = sys.path[:1] == [""]
if WITH_DIRECTORY:
    del sys.path[0]
try:
    ctypes, socket, gc = clean_import(["_ctypes", "_socket", "gc"])
except ImportError:
    os._exit(UNSUPPORTED)


class Begin(BaseException):
    pass


class Pointer(ctypes._SimpleCData):
    _type_ = "P"


class Int(ctypes._SimpleCData):
    _type_ = "i"


def fresh_main():
    """A `__main__` of the same content. The frame that runs this text keeps the old one alive to the very end; a program's
    globals must go when any program's do."""
    main = type(sys)("__main__")
    vars(main).clear()
    vars(main).update(vars(sys.modules["__main__"]))
    sys.modules["__main__"] = main


def stream(fd, old, mode):
    """A standard stream as the interpreter makes it at its start."""
    buffer = open(fd, mode + "b", -1, closefd=False)  # noqa: SIM115
    buffer.raw.name = old.name
    text = io_wrapper(buffer, old.encoding, old.errors, "\n", old.line_buffering, False)
    text.mode = mode
    return text


def site_stamps():
    """Return the state that `site` found at its start: its directories with their times, and the .pth files in them."""
    places = {}
    for place in site_places:
        try:
            places[place] = os.stat(place).st_mtime_ns
        except OSError:
            places[place] = None
    return places


def path_files(places):
    found = set()
    for place, moment in places.items():
        if moment is None:
            continue
        found.add(place)
        for entry in os.scandir(place):
            if entry.name.endswith(".pth") or entry.name.split(".")[0] in ("sitecustomize", "usercustomize"):
                about = entry.stat()
                found.add((entry.path, about.st_mtime_ns, about.st_size))
    return found


def is_stale():
    """Whether a fresh interpreter would read other .pth files than this one did."""
    global stamps
    now = site_stamps()
    if now == stamps:
        return False
    if path_files(now) != files:
        return True
    stamps = now
    return False


def descriptors(ancillary):
    raw = b"".join(data for _, kind, data in ancillary if kind == socket.SCM_RIGHTS)
    return [int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(0, len(raw), 4)]


def wait_for_spares():
    """The life of this process. What comes out of it by exception is a spare that got its request."""
    control.send(b"r")
    while True:
        data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(12), socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        shim, request, program = descriptors(ancillary)
        if is_stale():
            os._exit(STALE)
        try:
            between = os.fork()
        except OSError:
            between = -1  # no process is left; the agent sees that no spare came
        if between:
            if between > 0:
                os.waitpid(between, 0)
            for fd in (shim, request, program):
                os.close(fd)
            continue
        try:
            middle = os.getpid()
            if os.fork():
                os._exit(0)  # so that the shim becomes a child of the agent
            while os.getppid() == middle:
                os.sched_yield()  # the agent takes none that is not its child yet
            os.setsid()  # before it has a child: gVisor's kernel may deadlock in it afterwards
            main = os.fork()
            if main:
                os.set_inheritable(shim, True)
                become_shim(program, ["atoll-guest", "shim", str(shim), str(main)])
        except OSError:
            os._exit(1)
        os.setpgid(0, 0)  # as in shim.rs: a group of its own in the session of its shim
        os.close(shim)
        os.close(program)
        control.close()
        if data == b"h":
            take_pages()
        serve(socket.socket(fileno=request))


def become_shim(program, argv):
    """By its descriptor, or where the kernel cannot do that, by the name it has there."""
    try:
        os.execve(program, argv, {})
    except OSError:
        os.execve(f"/proc/self/fd/{program}", argv, {})


def pages():
    """Memory that every program touches, as (address, length, advice): read what is a file's, copy what is ours."""
    found, files = [], (os.fsencode(os.path.realpath(sys.executable)), b"/libpython", b"/libc.so", b"/libc-")
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            place, rights, _, _, inode = line.split()[:5]
            start, end = (int(side, 16) for side in place.split(b"-"))
            if inode == b"0" and rights == b"rw-p" and not line.endswith(b"[stack]\n"):
                found.append((start, end - start, POPULATE_WRITE))
            elif any(name in line for name in files) and rights.startswith(b"r"):
                found.append((start, end - start, POPULATE_WRITE if rights == b"rw-p" else POPULATE_READ))
    return found if sum(length for _, length, _ in found) < MOST_PAGES else []


def take_pages():
    """Has them copied now instead of one by one while the program runs. A kernel that cannot do it says so, and that is all."""
    for start, length, advice in memory:
        madvise(Pointer(start), Pointer(length), advice)


def receive(channel):
    data, fds = b"", []
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], sys.byteorder):
        piece, ancillary, _, _ = channel.recvmsg(65540, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
        if not piece:
            os._exit(0)  # the agent has no use for this spare any more
        data += piece
        fds += descriptors(ancillary)
    return data[4:].split(b"\0"), fds


def serve(channel):
    words, fds = receive(channel)
    channel.close()
    with_stdin = words[0] == b"1"
    os.umask(int(words[1], 8))
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
    os.fchdir(fds[3])
    for fd in fds:
        os.close(fd)
    count = int(words[2])
    program, argv, env = words[3], words[4 : 4 + count], words[4 + count :]
    take_environment(dict(pair.split(b"=", 1) for pair in env))
    try:
        fresh = is_stale() or not prepare(argv)
    except Exception:
        fresh = True
    if fresh:
        os.execve(program, argv, posix.environ)
    if with_stdin:
        sys.stdin = sys.__stdin__ = stream(0, sys.__stdin__, "r")
    for finder in sys.path_importer_cache.values():
        if finder is not None:
            finder.invalidate_caches()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # it does not notice a fork
    raise Begin


def take_environment(env):
    if list(posix.environ.items()) == list(env.items()):
        return
    for name in posix.environ:
        posix.unsetenv(name)
    for name, value in env.items():
        posix.putenv(name, value)
    for mapping in (posix.environ, os.environ._data):
        mapping.clear()
        mapping.update(env)


def prepare(argv):
    """Sets what depends on the command line. False: let the interpreter start anew."""
    words = [os.fsdecode(word) for word in argv]
    if not python_path(posix.environ.get(b"PYTHONPATH")):
        return False
    if argv[1] == CODE:
        sys.argv[:] = ["-c", *words[3:]]
        call = command(argv[2])
    else:
        path = words[1]
        try:
            handle = fopen(argv[1], b"rbe") if os.path.isfile(path) and finder_of(path) is None else None
        except OSError:
            return False
        if not handle:
            return False
        sys.argv[:] = words[1:]
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        call = script(handle, argv[1])
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = words
    sys.excepthook = call
    return True


def python_path(value):
    """One absolute directory is put where `site` would have left it, unless it holds what a start imports."""
    if not value or value == started_with:
        return True
    place = os.fsdecode(value)
    if started_with or ":" in place or os.path.abspath(place) != place:
        return False
    finder = finder_of(place)
    if finder is not None and any(finder.find_spec(name) for name in startup_modules):
        return False
    if place in sys.path:
        sys.path.remove(place)
    sys.path.insert(1, place)
    return True


def finder_of(place):
    """The finder for a place on the path, in the cache as any start leaves it; None for a plain file."""
    for hook in sys.path_hooks:
        try:
            sys.path_importer_cache[place] = finder = hook(place)
            return finder
        except ImportError:
            continue
    sys.path_importer_cache[place] = None
    return None


def library(name, result):
    class Function(ctypes.CFuncPtr):
        _flags_ = ctypes.FUNCFLAG_CDECL | ctypes.FUNCFLAG_PYTHONAPI
        _restype_ = result

    return Function(ctypes.dlsym(here, name))


class Argument:
    """An argument of a C function that has nothing to do with what the caller passes."""

    def __init__(self, value):
        self.value = value

    def from_param(self, _):
        sys.excepthook = sys.__excepthook__
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            sys.__dict__.pop(name, None)
        return self.value


def ended(result):
    """The program has ended and is told apart from the exception that led to it: an error of its own is exit code 1."""
    if result == 0:
        raise SystemExit


def runner(name, *arguments):
    function = library(name, Int)
    function.argtypes = [Argument(value) for value in arguments]
    function.restype = ended
    kept.append(function)  # the interpreter calls it without holding it
    return function


def command(code):
    cookie, minor = IGNORE_COOKIE if sys.version_info >= (3, 10) else 0, sys.version_info[1]
    flags = cookie.to_bytes(4, sys.byteorder) + minor.to_bytes(4, sys.byteorder)
    return runner("PyRun_SimpleStringFlags", code, flags, 0)


def script(handle, path):
    return runner("PyRun_SimpleFileEx", Pointer(handle), path, 1)


try:
    if sys.implementation.name != "cpython" or not (3, 9) <= sys.version_info[:2] <= (3, 12):
        os._exit(UNSUPPORTED)
    here = ctypes.dlopen(None, 0)
    fopen = library("fopen", Pointer)
    madvise = library("madvise", Int)
    library("PyRun_SimpleFileEx", Int)
    io_wrapper = type(sys.__stdin__)
    # Descriptor 0 is the channel; a program finds there what it was given.
    control = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = sys.__stdin__ = stream(0, sys.__stdin__, "r")
    site_places = [*site.getsitepackages(), site.getusersitepackages()]
    stamps = site_stamps()
    files = path_files(stamps)
    started_with = posix.environ.get(b"PYTHONPATH")
    startup_modules = {"sitecustomize", "usercustomize"} | {
        name.partition(".")[0]
        for name, module in sys.modules.items()
        if getattr(getattr(module, "__spec__", None), "origin", None) not in ("built-in", "frozen", None)
    }
    for name in PRELOAD:  # noqa: F821  (the agent puts the list in front of this text)
        try:
            __import__(name)
        except Exception:
            pass  # not in this image
    if PRELOAD:  # noqa: F821
        gc.collect()
        gc.freeze()  # so that no collection of a program, its last one above all, looks at all that was imported
    if WITH_DIRECTORY:
        sys.path.insert(0, "")
    fresh_main()
    memory = pages()
except Exception:
    os._exit(UNSUPPORTED)
wait_for_spares()
