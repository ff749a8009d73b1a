//! Globs of grep, sed and tar_out: which files of a tree are meant.
//!
//! A pattern without `/` is compared with the last component, one with `/` with the whole path from the root. `*`, `?` and
//! `[...]` stay inside a component, `**` as a whole component stands for any number of directories. Braces are ordinary
//! characters. Matching takes time proportional to pattern times path at worst.

use crate::op::OpError;

const MAX_PATTERN: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Char(u32),
    /// One character, whichever.
    Any,
    /// Any number of characters.
    Star,
    Class {
        negated: bool,
        ranges: Vec<(u32, u32)>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    /// `**`: any number of directories, also none.
    Directories,
    /// `**` at the end: all that is below, at least one component.
    Below,
    Name(Vec<Token>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    parts: Vec<Part>,
    anchored: bool,
    directories_only: bool,
}

impl Glob {
    pub fn new(pattern: &[u8]) -> Result<Self, OpError> {
        if pattern.is_empty() || pattern.len() > MAX_PATTERN {
            return Err(OpError::invalid("a glob must have between 1 and 4096 bytes"));
        }
        if pattern.first() == Some(&b'!') {
            return Err(OpError::invalid("a glob cannot start with `!`: use the list of excludes"));
        }
        let body = pattern.strip_suffix(b"/").unwrap_or(pattern);
        let directories_only = body.len() < pattern.len();
        let anchored = body.contains(&b'/');
        let mut parts: Vec<Part> = Vec::new();
        let mut pieces = body.split(|b| *b == b'/').filter(|piece| !piece.is_empty()).peekable();
        while let Some(piece) = pieces.next() {
            let part = match piece {
                b"**" if anchored && pieces.peek().is_none() => Part::Below,
                b"**" if anchored => Part::Directories,
                _ => Part::Name(tokens(piece)),
            };
            if !(part == Part::Directories && parts.last() == Some(&Part::Directories)) {
                parts.push(part);
            }
        }
        Ok(Self { parts, anchored, directories_only })
    }

    /// Whether the pattern means this path, which is relative to the root.
    pub fn matches(&self, path: &[u8], is_directory: bool) -> bool {
        if self.directories_only && !is_directory {
            return false;
        }
        if self.anchored {
            return self.matches_whole(path);
        }
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or(path);
        matches!(self.parts.as_slice(), [Part::Name(tokens)] if matches_name(tokens, name))
    }

    /// Follows all ways through the pattern at once: `reached[i]` says the first `i` parts cover the path so far.
    fn matches_whole(&self, path: &[u8]) -> bool {
        let mut reached = vec![false; self.parts.len() + 1];
        mark(&mut reached, 0);
        self.close(&mut reached);
        for component in path.split(|b| *b == b'/') {
            let mut next = vec![false; reached.len()];
            for (at, part) in self.parts.iter().enumerate() {
                if !reached.get(at).copied().unwrap_or(false) {
                    // `Below` also keeps what it has covered already.
                    if *part == Part::Below && reached.get(at + 1).copied().unwrap_or(false) {
                        mark(&mut next, at + 1);
                    }
                    continue;
                }
                match part {
                    Part::Directories => mark(&mut next, at),
                    Part::Below => mark(&mut next, at + 1),
                    Part::Name(tokens) if matches_name(tokens, component) => mark(&mut next, at + 1),
                    Part::Name(_) => {}
                }
            }
            self.close(&mut next);
            reached = next;
        }
        reached.last().copied().unwrap_or(false)
    }

    /// `**/` may stand for nothing.
    fn close(&self, reached: &mut [bool]) {
        for (at, part) in self.parts.iter().enumerate() {
            if *part == Part::Directories && reached.get(at).copied().unwrap_or(false) {
                mark(reached, at + 1);
            }
        }
    }
}

fn mark(set: &mut [bool], at: usize) {
    if let Some(slot) = set.get_mut(at) {
        *slot = true;
    }
}

/// The next character; a byte that is no UTF-8 counts as one that equals only itself.
fn next_char(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let first = *bytes.first()?;
    let len = match first {
        0..=0x7f => return Some((u32::from(first), bytes.get(1..)?)),
        0xc2..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xf4 => 4,
        _ => 1,
    };
    let decoded = bytes.get(..len).and_then(|head| std::str::from_utf8(head).ok()).and_then(|text| text.chars().next());
    match decoded {
        Some(c) => Some((c as u32, bytes.get(len..)?)),
        None => Some((0x11_0000 + u32::from(first), bytes.get(1..)?)),
    }
}

fn tokens(mut pattern: &[u8]) -> Vec<Token> {
    let mut tokens = Vec::new();
    while let Some((c, rest)) = next_char(pattern) {
        pattern = rest;
        let token = match char::from_u32(c) {
            Some('*') => {
                if tokens.last() == Some(&Token::Star) {
                    continue;
                }
                Token::Star
            }
            Some('?') => Token::Any,
            Some('\\') => match next_char(pattern) {
                Some((escaped, rest)) => {
                    pattern = rest;
                    Token::Char(escaped)
                }
                None => Token::Char(c),
            },
            Some('[') => match class(pattern) {
                Some((class, rest)) => {
                    pattern = rest;
                    class
                }
                // Never closed: an ordinary character.
                None => Token::Char(c),
            },
            _ => Token::Char(c),
        };
        tokens.push(token);
    }
    tokens
}

/// A class after its `[`, and what follows its `]`. A `]` that comes first is a member.
fn class(mut pattern: &[u8]) -> Option<(Token, &[u8])> {
    let negated = matches!(pattern.first(), Some(b'!' | b'^'));
    if negated {
        pattern = pattern.get(1..)?;
    }
    let mut ranges = Vec::new();
    loop {
        let (mut low, rest) = next_char(pattern)?;
        pattern = rest;
        if low == u32::from(b']') && !ranges.is_empty() {
            return Some((Token::Class { negated, ranges }, pattern));
        }
        if low == u32::from(b'\\') {
            let (escaped, rest) = next_char(pattern)?;
            (low, pattern) = (escaped, rest);
        }
        let mut high = low;
        if pattern.first() == Some(&b'-') && pattern.get(1).is_some_and(|b| *b != b']') {
            let (end, rest) = next_char(pattern.get(1..)?)?;
            (high, pattern) = (end, rest);
            if high == u32::from(b'\\') {
                let (escaped, rest) = next_char(pattern)?;
                (high, pattern) = (escaped, rest);
            }
        }
        ranges.push((low, high));
    }
}

/// Only the last star is ever retried, so a name takes at most pattern times name steps.
fn matches_name(tokens: &[Token], name: &[u8]) -> bool {
    let (mut rest, mut at) = (name, 0);
    let mut retry: Option<(usize, &[u8])> = None;
    loop {
        let step = match (tokens.get(at), next_char(rest)) {
            (None, None) => return true,
            (Some(Token::Star), _) => {
                retry = Some((at, rest));
                at += 1;
                continue;
            }
            (Some(token), Some((c, after))) if accepts(token, c) => Some(after),
            _ => None,
        };
        match (step, retry) {
            (Some(after), _) => {
                rest = after;
                at += 1;
            }
            (None, Some((star, from))) => {
                let Some((_, after)) = next_char(from) else { return false };
                retry = Some((star, after));
                rest = after;
                at = star + 1;
            }
            (None, None) => return false,
        }
    }
}

fn accepts(token: &Token, c: u32) -> bool {
    match token {
        Token::Char(wanted) => *wanted == c,
        Token::Any | Token::Star => true,
        Token::Class { negated, ranges } => ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != *negated,
    }
}

/// The includes and excludes of a request.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    include: Vec<Glob>,
    exclude: Vec<Glob>,
}

impl Choice {
    pub fn new(include: &[Vec<u8>], exclude: &[Vec<u8>]) -> Result<Self, OpError> {
        let parse = |list: &[Vec<u8>]| list.iter().map(|pattern| Glob::new(pattern)).collect::<Result<Vec<_>, _>>();
        Ok(Self { include: parse(include)?, exclude: parse(exclude)? })
    }

    /// Whether a file is chosen, its directories not considered: a walk has pruned those.
    pub fn takes(&self, path: &[u8]) -> bool {
        !self.drops(path, false)
            && (self.include.is_empty() || self.include.iter().any(|glob| glob.matches(path, false)))
    }

    /// Whether an entry, and all below it, is excluded.
    pub fn drops(&self, path: &[u8], is_directory: bool) -> bool {
        self.exclude.iter().any(|glob| glob.matches(path, is_directory))
    }

    /// Whether a file is chosen, with every directory above it tried as a walk would.
    pub fn takes_path(&self, path: &[u8]) -> bool {
        let above = path.iter().enumerate().filter(|(_, b)| **b == b'/').filter_map(|(at, _)| path.get(..at));
        self.takes(path) && !above.into_iter().any(|directory| self.drops(directory, true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn include(pattern: &str, path: &str) -> bool {
        Choice::new(&[pattern.into()], &[]).unwrap().takes_path(path.as_bytes())
    }

    fn excluded(pattern: &str, path: &str) -> bool {
        !Choice::new(&[], &[pattern.into()]).unwrap().takes_path(path.as_bytes())
    }

    #[test]
    fn includes_follow_the_contract() {
        for (pattern, path) in [
            ("*.py", "a/b/x.py"),
            ("*", "a/b.c"),
            ("src/*.py", "src/x.py"),
            ("**/*.py", "x.py"),
            ("**/*.py", "a/b/x.py"),
            ("**/src/*.py", "src/x.py"),
            ("src/**/x.py", "src/a/x.py"),
            ("src/**", "src/a"),
            ("**/src/*.py", "a/src/x.py"),
            ("src/**/x.py", "src/x.py"),
            ("src/**/x.py", "src/a/b/x.py"),
            ("src/**", "src/a/b"),
            ("/src/*.py", "src/x.py"),
            ("[ab].py", "a.py"),
            ("{a,b}.py", "{a,b}.py"),
            ("**", "a/b"),
            ("a/**/b/**/c", "a/b/x/b/c"),
            ("[!a-c]?.t[]x]t", "dé.txt"),
            (r"\*", "*"),
            ("[", "["),
            ("a**b", "axxb"),
        ] {
            assert!(include(pattern, path), "{pattern} ~ {path}");
        }
        for (pattern, path) in [
            ("src/*.py", "src/a/x.py"),
            ("{a,b}.py", "a.py"),
            ("node_modules", "node_modules/a.js"),
            ("src/*", "src/a/x.py"),
            ("src/**", "src"),
            ("/x.py", "a/x.py"),
            ("?", "ab"),
            ("[^a]", "a"),
            ("build/", "build"),
            ("a/**/b", "a/bb"),
            (r"\*", "x"),
        ] {
            assert!(!include(pattern, path), "{pattern} ~ {path}");
        }
    }

    #[test]
    fn excludes_follow_the_contract() {
        for (pattern, path) in [
            ("node_modules", "node_modules/a.js"),
            ("node_modules", "x/node_modules/y/a.js"),
            ("build/", "build/o.txt"),
            ("src/*", "src/a/x.py"),
            ("*.o", "a/b.o"),
        ] {
            assert!(excluded(pattern, path), "{pattern} ~ {path}");
        }
        assert!(!excluded("build/", "build"));
        assert!(!excluded("src/*", "other/src/x"));
    }

    #[test]
    fn an_exclude_wins_over_an_include() {
        let choice = Choice::new(&["*.py".into()], &["test_*".into()]).unwrap();
        assert!(choice.takes_path(b"a.py"));
        assert!(!choice.takes_path(b"test_a.py"));
    }

    #[test]
    fn negation_and_nothing_are_refused() {
        for pattern in ["!a", ""] {
            assert_eq!(Glob::new(pattern.as_bytes()).unwrap_err().code, "invalid_argument");
        }
    }

    #[test]
    fn many_stars_take_no_time() {
        let pattern = "*a".repeat(1000) + "b";
        assert!(!Glob::new(pattern.as_bytes()).unwrap().matches(&[b'a'; 255], false));
        let pattern = "**/a/".repeat(500) + "b";
        assert!(!Glob::new(pattern.as_bytes()).unwrap().matches("a/".repeat(1000).as_bytes(), false));
    }
}
