//! The tar format: headers and pax records, read as hostile input and written as POSIX pax with numeric owners.

use crate::op::OpError;

pub const BLOCK: usize = 512;
/// Extended headers and long names larger than this are no honest archive's.
pub const LARGEST_EXTENSION: u64 = 1 << 20;
/// The largest value that fits into the eleven octal digits of a size.
const OCTAL_11: u64 = 0o777_7777_7777;
const OCTAL_7: u64 = 0o777_7777;

pub mod kind {
    pub const FILE: u8 = b'0';
    pub const HARD_LINK: u8 = b'1';
    pub const SYMLINK: u8 = b'2';
    pub const DIRECTORY: u8 = b'5';
    pub const PAX: u8 = b'x';
    pub const PAX_GLOBAL: u8 = b'g';
    pub const GNU_LONG_NAME: u8 = b'L';
    pub const GNU_LONG_LINK: u8 = b'K';
}

pub fn broken(what: &str) -> OpError {
    OpError::invalid(format!("the archive is broken: {what}"))
}

/// A member as its header describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Header {
    pub kind: u8,
    pub name: Vec<u8>,
    pub link: Vec<u8>,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub size: u64,
    pub mtime: i64,
    pub mtime_nanos: u32,
}

/// Reads a header block; `None` for the block of zeros that ends an archive.
pub fn parse(block: &[u8; BLOCK]) -> Result<Option<Header>, OpError> {
    if block.iter().all(|b| *b == 0) {
        return Ok(None);
    }
    let part = |at: usize, len: usize| block.get(at..at + len).unwrap_or_default();
    let stated = number(part(148, 8))?;
    let sum = |byte: fn(u8) -> i64| -> i64 {
        let inside = |at: usize| (148..156).contains(&at);
        block.iter().enumerate().map(|(at, b)| if inside(at) { 32 } else { byte(*b) }).sum()
    };
    // Some old writers summed signed bytes.
    if stated != sum(i64::from) && stated != sum(|b| i64::from(b as i8)) {
        return Err(broken("a header has a wrong checksum"));
    }
    let mut name = text(part(0, 100)).to_vec();
    if part(257, 6) == b"ustar\0" {
        let prefix = text(part(345, 155));
        if !prefix.is_empty() {
            name = [prefix, b"/", &name].concat();
        }
    }
    let unsigned = |at: usize, len: usize| -> Result<u64, OpError> {
        u64::try_from(number(part(at, len))?).map_err(|_| broken("a negative number"))
    };
    Ok(Some(Header {
        kind: block.get(156).copied().unwrap_or(0),
        name,
        link: text(part(157, 100)).to_vec(),
        mode: (unsigned(100, 8)? & 0o7777) as u32,
        uid: unsigned(108, 8)?,
        gid: unsigned(116, 8)?,
        size: unsigned(124, 12)?,
        mtime: number(part(136, 12))?,
        mtime_nanos: 0,
    }))
}

/// A field up to its first NUL.
pub fn text(field: &[u8]) -> &[u8] {
    field.split(|b| *b == 0).next().unwrap_or_default()
}

/// Octal digits, or the binary form GNU tar uses for what does not fit.
fn number(field: &[u8]) -> Result<i64, OpError> {
    let first = field.first().copied().unwrap_or(0);
    if first & 0x80 != 0 {
        let negative = first & 0x40 != 0;
        let mut value: i128 = if negative { -1 } else { 0 };
        for (at, byte) in field.iter().enumerate() {
            let byte = if at == 0 && !negative { byte & 0x7f } else { *byte };
            value = (value << 8) | i128::from(byte);
            if i64::try_from(value).is_err() {
                return Err(broken("a number is too large"));
            }
        }
        return i64::try_from(value).map_err(|_| broken("a number is too large"));
    }
    let mut value: i64 = 0;
    for digit in text(field).iter().skip_while(|b| **b == b' ').take_while(|b| **b != b' ') {
        if !(b'0'..=b'7').contains(digit) {
            return Err(broken("a number is not octal"));
        }
        let next = value.checked_mul(8).and_then(|value| value.checked_add(i64::from(digit - b'0')));
        value = next.ok_or_else(|| broken("a number is too large"))?;
    }
    Ok(value)
}

/// Key and value.
type Record<'a> = (&'a [u8], &'a [u8]);

/// The records of a pax header, each `length key=value\n`.
pub fn pax_records(mut data: &[u8]) -> Result<Vec<Record<'_>>, OpError> {
    let bad = || broken("a pax record");
    let mut records = Vec::new();
    while !data.is_empty() && data.first() != Some(&0) {
        let space = data.iter().take(8).position(|b| *b == b' ').ok_or_else(bad)?;
        let digits = data.get(..space).and_then(|d| std::str::from_utf8(d).ok()).ok_or_else(bad)?;
        let length: usize = digits.parse().map_err(|_| bad())?;
        let record = data.get(space + 1..length).ok_or_else(bad)?;
        let record = record.strip_suffix(b"\n").ok_or_else(bad)?;
        let equals = record.iter().position(|b| *b == b'=').ok_or_else(bad)?;
        let (key, value) = record.split_at(equals);
        records.push((key, value.get(1..).unwrap_or_default()));
        data = data.get(length..).ok_or_else(bad)?;
    }
    Ok(records)
}

/// Fields of a pax header about the member after it.
#[derive(Debug, Default)]
pub struct Extension {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u64>,
    pub gid: Option<u64>,
    pub mtime: Option<(i64, u32)>,
}

impl Extension {
    pub fn read(&mut self, data: &[u8]) -> Result<(), OpError> {
        for (key, value) in pax_records(data)? {
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(decimal(value)?),
                b"uid" => self.uid = Some(decimal(value)?),
                b"gid" => self.gid = Some(decimal(value)?),
                b"mtime" => self.mtime = Some(time(value)?),
                _ if key.starts_with(b"GNU.sparse.") => {
                    return Err(OpError::new("unsupported", "sparse members are not supported"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Puts itself over the header it belongs to.
    pub fn apply(self, header: &mut Header) {
        header.name = self.path.unwrap_or_else(|| std::mem::take(&mut header.name));
        header.link = self.link.unwrap_or_else(|| std::mem::take(&mut header.link));
        header.size = self.size.unwrap_or(header.size);
        header.uid = self.uid.unwrap_or(header.uid);
        header.gid = self.gid.unwrap_or(header.gid);
        (header.mtime, header.mtime_nanos) = self.mtime.unwrap_or((header.mtime, header.mtime_nanos));
    }
}

fn decimal(value: &[u8]) -> Result<u64, OpError> {
    let digits = std::str::from_utf8(value).ok().filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
    digits.and_then(|text| text.parse().ok()).ok_or_else(|| broken("a pax number"))
}

/// Seconds with an optional fraction.
fn time(value: &[u8]) -> Result<(i64, u32), OpError> {
    let text = std::str::from_utf8(value).map_err(|_| broken("a pax time"))?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().map_err(|_| broken("a pax time"))?;
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return Err(broken("a pax time"));
    }
    let nanos = fraction.bytes().chain(std::iter::repeat(b'0')).take(9).fold(0, |n, b| n * 10 + u32::from(b - b'0'));
    Ok(if whole.starts_with('-') && nanos > 0 {
        (seconds.saturating_sub(1), 1_000_000_000 - nanos)
    } else {
        (seconds, nanos)
    })
}

/// Appends the header of a member, with a pax header before it when something does not fit.
pub fn build(out: &mut Vec<u8>, header: &Header) {
    let mut records = Vec::new();
    if header.name.len() > 100 {
        record(&mut records, b"path", &header.name);
    }
    if header.link.len() > 100 {
        record(&mut records, b"linkpath", &header.link);
    }
    for (key, value, limit) in
        [("size", header.size, OCTAL_11), ("uid", header.uid, OCTAL_7), ("gid", header.gid, OCTAL_7)]
    {
        if value > limit {
            record(&mut records, key.as_bytes(), value.to_string().as_bytes());
        }
    }
    if !(0..=OCTAL_11 as i64).contains(&header.mtime) {
        record(&mut records, b"mtime", header.mtime.to_string().as_bytes());
    }
    if !records.is_empty() {
        if std::str::from_utf8(&header.name).is_err() || std::str::from_utf8(&header.link).is_err() {
            let mut marked = Vec::new();
            record(&mut marked, b"hdrcharset", b"BINARY");
            marked.append(&mut records);
            records = marked;
        }
        let pax = Header {
            kind: kind::PAX,
            name: b"pax".to_vec(),
            mode: 0o644,
            size: records.len() as u64,
            ..Header::default()
        };
        block(out, &pax);
        out.extend_from_slice(&records);
        pad(out, records.len() as u64);
    }
    block(out, header);
}

/// Fills up to the next block after `size` bytes of content.
pub fn pad(out: &mut Vec<u8>, size: u64) {
    out.resize(out.len() + padding(size), 0);
}

pub fn padding(size: u64) -> usize {
    (BLOCK - (size % BLOCK as u64) as usize) % BLOCK
}

fn record(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // The length counts its own digits.
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    out.extend_from_slice(length.to_string().as_bytes());
    out.push(b' ');
    out.extend_from_slice(key);
    out.push(b'=');
    out.extend_from_slice(value);
    out.push(b'\n');
}

fn block(out: &mut Vec<u8>, header: &Header) {
    let mut block = [0u8; BLOCK];
    let mut put = |at: usize, len: usize, bytes: &[u8]| {
        let bytes = bytes.get(..len).unwrap_or(bytes);
        if let Some(slot) = block.get_mut(at..at + bytes.len()) {
            slot.copy_from_slice(bytes);
        }
    };
    let octal = |value: u64, digits: usize, limit: u64| format!("{:0digits$o}", if value > limit { 0 } else { value });
    put(0, 100, &header.name);
    put(100, 7, octal(u64::from(header.mode), 7, OCTAL_7).as_bytes());
    put(108, 7, octal(header.uid, 7, OCTAL_7).as_bytes());
    put(116, 7, octal(header.gid, 7, OCTAL_7).as_bytes());
    put(124, 11, octal(header.size, 11, OCTAL_11).as_bytes());
    put(136, 11, octal(header.mtime.max(0) as u64, 11, OCTAL_11).as_bytes());
    put(148, 8, b"        ");
    put(156, 1, &[header.kind]);
    put(157, 100, &header.link);
    put(257, 8, b"ustar\x0000");
    let sum: u64 = block.iter().map(|b| u64::from(*b)).sum();
    let checksum = format!("{sum:06o}\0 ");
    if let Some(slot) = block.get_mut(148..156) {
        slot.copy_from_slice(checksum.as_bytes());
    }
    out.extend_from_slice(&block);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_is_read_again() {
        for header in [
            Header {
                kind: kind::FILE,
                name: b"a/b".to_vec(),
                mode: 0o644,
                uid: 1,
                gid: 2,
                size: 3,
                mtime: 4,
                ..Header::default()
            },
            Header { kind: kind::SYMLINK, name: vec![b'n'; 100], link: vec![b'l'; 100], ..Header::default() },
        ] {
            let mut out = Vec::new();
            build(&mut out, &header);
            let block: &[u8; BLOCK] = out.as_slice().try_into().unwrap();
            assert_eq!(parse(block).unwrap(), Some(header));
        }
    }

    #[test]
    fn what_does_not_fit_goes_into_a_pax_header() {
        let header = Header {
            kind: kind::FILE,
            name: [b"\xff".as_slice(), &[b'x'; 200]].concat(),
            size: 1 << 40,
            uid: 3_000_000,
            mtime: -5,
            ..Header::default()
        };
        let mut out = Vec::new();
        build(&mut out, &header);
        assert_eq!(out.len() % BLOCK, 0);
        let pax = parse(out[..BLOCK].try_into().unwrap()).unwrap().unwrap();
        assert_eq!(pax.kind, kind::PAX);
        let mut extension = Extension::default();
        extension.read(&out[BLOCK..BLOCK + pax.size as usize]).unwrap();
        let mut read = parse(out[out.len() - BLOCK..].try_into().unwrap()).unwrap().unwrap();
        extension.apply(&mut read);
        assert_eq!(read, header);
    }

    #[test]
    fn numbers_and_times_are_checked() {
        assert_eq!(number(b"0000644\0").unwrap(), 0o644);
        assert_eq!(number(b"  644 \0").unwrap(), 0o644);
        assert_eq!(number(b"\x80\0\0\0\0\0\0\0\0\0\x01\0").unwrap(), 256);
        assert_eq!(number(&[0xff; 12]).unwrap(), -1);
        assert!(number(&[0x80, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]).is_err());
        assert!(number(b"9").is_err());
        assert_eq!(time(b"1.5").unwrap(), (1, 500_000_000));
        assert_eq!(time(b"-1.5").unwrap(), (-2, 500_000_000));
        for bad in [&b"5 a=b"[..], b"99 a=b\n", b"x a=b\n", b"3 a\n", b"6 a=b"] {
            assert!(pax_records(bad).is_err());
        }
    }
}
