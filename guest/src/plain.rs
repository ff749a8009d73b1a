//! Shell commands that need no shell: `ls -l src` starts `ls`, and bash is left out.
//!
//! Bash would parse such a line, find the program and become it, which costs as much as many a program. The result is the
//! same here because all that bash would do with the line is known: words of letters that mean nothing to it, a first word
//! that is none of its own commands, and no variable that changes what it does. Where anything is not so, bash gets the
//! line; and where the program does not start, bash gets it too, and says so in its own words (`Spec::otherwise`).

use std::ffi::CString;

use crate::launch::Env;

const LONGEST: usize = 4096;
/// Words that bash itself understands as a first word. A name with a slash is never one of these.
const OWN: &str = "\
    . : alias bg bind break builtin caller case cd command compgen complete compopt continue coproc declare dirs \
    disown do done echo elif else enable esac eval exec exit export false fc fg fi for function getopts hash help \
    history if in jobs kill let local logout mapfile popd printf pushd pwd read readarray readonly return select set \
    shift shopt source suspend test then time times trap true type typeset ulimit umask unalias unset until wait \
    while";
/// Variables that change what bash does or passes on, beside all that begin with `BASH`.
const TELLING: &str = "\
    EPOCHREALTIME EPOCHSECONDS EXECIGNORE HISTCMD IFS LINENO OLDPWD OPTERR OPTIND POSIXLY_CORRECT POSIX_PEDANTIC \
    PPID PS1 PS4 RANDOM SHELLOPTS SHLVL SRANDOM SSH2_CLIENT SSH_CLIENT";
/// Words that some builds of bash do not know.
const LOCALES: &str = "C C.UTF-8 POSIX";

/// The program to start in place of bash, with its arguments. `env` then has what bash would have added.
pub fn command(line: &[u8], cwd: &[u8], env: &mut Env) -> Option<(CString, Vec<Vec<u8>>)> {
    let words = words(line)?;
    let first = words.first()?;
    let (slash, odd) = (first.contains(&b'/'), first.iter().any(|b| matches!(b, b'=' | b'%')));
    if odd || (!slash && named(first, OWN)) || !is_quiet(cwd, env) {
        return None;
    }
    let program = if slash { CString::new(*first).ok()? } else { find(first, env)? };
    env.retain(|(key, _)| key != b"_");
    env.push((b"SHLVL".to_vec(), b"0".to_vec()));
    env.push((b"_".to_vec(), program.as_bytes().to_vec()));
    Some((program, words.iter().map(|word| word.to_vec()).collect()))
}

fn words(line: &[u8]) -> Option<Vec<&[u8]>> {
    let known = |b: &u8| b.is_ascii_alphanumeric() || b" \t_-./:,@%+=".contains(b);
    (line.len() <= LONGEST && line.iter().all(known))
        .then(|| line.split(|b| matches!(b, b' ' | b'\t')).filter(|word| !word.is_empty()).collect())
}

fn named(word: &[u8], names: &str) -> bool {
    names.split_ascii_whitespace().any(|name| name.as_bytes() == word)
}

/// Whether bash would leave the environment as it is, but for what `command` adds.
fn is_quiet(cwd: &[u8], env: &Env) -> bool {
    env.iter().all(|(key, value)| match key.as_slice() {
        b"PWD" => value == cwd && is_plain_path(value),
        b"LC_ALL" => named(value, LOCALES),
        key => !key.starts_with(b"BASH") && !named(key, TELLING),
    }) && env.iter().any(|(key, _)| key == b"PWD")
}

/// An absolute path as bash would write it.
fn is_plain_path(path: &[u8]) -> bool {
    let Some(rest) = path.strip_prefix(b"/") else { return false };
    rest.is_empty() || rest.split(|b| *b == b'/').all(|part| !matches!(part, b"" | b"." | b".."))
}

fn find(name: &[u8], env: &Env) -> Option<CString> {
    let (_, path) = env.iter().find(|(key, value)| key == b"PATH" && value.len() <= LONGEST)?;
    for dir in path.split(|b| *b == b':') {
        if dir.first() != Some(&b'/') {
            return None; // looked for from the command's own directory, which bash knows how to do
        }
        let file = CString::new([dir, b"/", name].concat()).ok()?;
        if unsafe { libc::access(file.as_ptr(), libc::X_OK) } == 0 {
            return Some(file);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(extra: &[(&str, &str)]) -> Env {
        let mut all: Env = vec![];
        for (key, value) in [("PATH", "/usr/bin:/bin"), ("PWD", "/workspace")].iter().chain(extra) {
            all.retain(|(k, _)| k != key.as_bytes());
            all.push((key.as_bytes().to_vec(), value.as_bytes().to_vec()));
        }
        all
    }

    #[test]
    fn words_that_mean_nothing_to_a_shell() {
        let mut env = env(&[("_", "old")]);
        let (program, argv) = command(b" ls  -l\t--color=no a.b/c ", b"/workspace", &mut env).unwrap();
        assert_eq!(program.to_bytes(), b"/usr/bin/ls");
        assert_eq!(argv, [b"ls".as_slice(), b"-l", b"--color=no", b"a.b/c"]);
        assert_eq!(env.iter().filter(|(k, v)| k == b"_" && v == b"/usr/bin/ls").count(), 1);
        assert!(env.contains(&(b"SHLVL".to_vec(), b"0".to_vec())));
    }

    #[test]
    fn whatever_else_is_left_to_bash() {
        #[rustfmt::skip]
        let lines = [
            "", " ", "ls;ls", "ls|ls", "ls&", "ls $A", "ls `x`", "ls 'a'", "ls \"a\"", "ls *", "ls ?", "ls [a]", "ls ~",
            "ls {a,b}", "ls #a", "ls !a", "ls >a", "ls <a", "ls (a)", "ls \\a", "ls\nls", "ls a^b", "A=1 ls", "A=1",
            "echo a", "cd /", "exit 3", "time ls", "true", ". a", "%1", "no-such-program-at-all", "ls \u{e9}",
        ];
        for line in lines {
            assert!(command(line.as_bytes(), b"/workspace", &mut env(&[])).is_none(), "{line}");
        }
        assert!(command(&[b"ls ".as_slice(), &[b'a'; LONGEST]].concat(), b"/workspace", &mut env(&[])).is_none());
        #[rustfmt::skip]
        let telling = [
            ("BASH_ENV", "/x"), ("BASH_FUNC_ls%%", "() { :; }"), ("SHELLOPTS", "xtrace"), ("SHLVL", "3"), ("IFS", "l"),
            ("PWD", "here"), ("PWD", "/a/../b"), ("PWD", "/a//b"), ("PWD", "/a/"), ("OLDPWD", "/"), ("LC_ALL", "xx"),
            ("PATH", "bin:/usr/bin"), ("PATH", ""), ("SSH_CLIENT", "x"),
        ];
        for pair in telling {
            let cwd = if pair.0 == "PWD" { pair.1 } else { "/workspace" };
            assert!(command(b"ls", cwd.as_bytes(), &mut env(&[pair])).is_none(), "{pair:?}");
        }
        assert!(command(b"ls", b"/elsewhere", &mut env(&[])).is_none());
        assert!(command(b"ls", b"/", &mut env(&[("LC_ALL", "C.UTF-8"), ("PWD", "/")])).is_some());
    }
}
