//! Properties of the frame codec: whatever comes in, in whatever pieces, it neither panics nor grows nor lies.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use atoll_guest::wire::{self, Decoder, Kind, HEAD, MAX_CONTROL, MAX_DATA, MAX_REQUEST};
use proptest::prelude::*;

const KINDS: &[Kind] = &[Kind::Request, Kind::Result, Kind::Event, Kind::Data, Kind::Eof, Kind::Credit, Kind::Cancel];

fn feed(decoder: &mut Decoder, mut bytes: &[u8], most: usize, mut each: impl FnMut(u32, Kind, &[u8])) -> bool {
    while !bytes.is_empty() {
        let space = decoder.space();
        assert!(!space.is_empty());
        let n = space.len().min(bytes.len()).min(most);
        space[..n].copy_from_slice(&bytes[..n]);
        decoder.filled(n);
        bytes = &bytes[n..];
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => each(frame.stream, frame.kind, frame.payload),
                Ok(None) => break,
                Err(_) => return false,
            }
        }
        assert!(decoder.pending() <= HEAD + MAX_REQUEST);
    }
    true
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// What is encoded comes out again, however it is cut.
    #[test]
    fn round_trip(frames in prop::collection::vec((1u32.., 0usize..KINDS.len(), prop::collection::vec(any::<u8>(), 0..3000)), 1..12),
                  most in 1usize..5000) {
        let wire_bytes: Vec<u8> = frames.iter().flat_map(|(s, k, p)| wire::raw(*s, KINDS[*k], p)).collect();
        let mut got = Vec::new();
        let mut decoder = Decoder::default();
        prop_assert!(feed(&mut decoder, &wire_bytes, most, |s, k, p| got.push((s, k, p.to_vec()))));
        let wanted: Vec<_> = frames.into_iter().map(|(s, k, p)| (s, KINDS[k], p)).collect();
        prop_assert_eq!(got, wanted);
        prop_assert_eq!(decoder.pending(), 0);
    }

    /// Noise is survived, and what is decoded from it keeps to the limits.
    #[test]
    fn noise(bytes in prop::collection::vec(any::<u8>(), 0..4000), most in 1usize..600) {
        feed(&mut Decoder::default(), &bytes, most, |_, kind, payload| {
            let most = match kind {
                Kind::Data => MAX_DATA + 1,
                Kind::Request => MAX_REQUEST,
                _ => MAX_CONTROL,
            };
            assert!(payload.len() <= most);
        });
        let _ = wire::decode_map(&bytes);
    }

    /// Frames with plausible heads and random payloads.
    #[test]
    fn plausible(length in 0u32..3_000_000, stream: u32, kind in 0u8..14, tail in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.extend(stream.to_be_bytes());
        bytes.push(kind);
        bytes.extend(&tail);
        feed(&mut Decoder::default(), &bytes, usize::MAX, |_, _, payload| { let _ = wire::decode_map(payload); });
    }
}

/// A payload at the limit passes, one byte more does not; nesting of 32 passes, far more does not.
#[test]
fn limits() {
    for (kind, size) in [(Kind::Data, MAX_DATA + 1), (Kind::Request, MAX_REQUEST), (Kind::Event, MAX_CONTROL)] {
        let mut count = 0;
        assert!(feed(&mut Decoder::default(), &wire::raw(1, kind, &vec![7; size]), usize::MAX, |_, _, _| count += 1));
        assert_eq!(count, 1);
        assert!(!feed(&mut Decoder::default(), &wire::raw(1, kind, &vec![7; size + 1]), usize::MAX, |_, _, _| ()));
    }
    let nested = |levels: usize| {
        let mut bytes = vec![0x81, 0xa1, b'x'];
        bytes.extend(std::iter::repeat_n(0x91, levels - 2));
        bytes.push(0x90);
        bytes
    };
    assert!(wire::decode_map(&nested(32)).is_some());
    assert!(wire::decode_map(&nested(40)).is_none());
    assert!(wire::decode_map(&nested(1_000_000)).is_none());
}

/// The corpus holds what fuzzing and thought found interesting.
#[test]
fn corpus() {
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz-corpus");
    for entry in std::fs::read_dir(corpus).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        for most in [1, 7, 100_000] {
            feed(&mut Decoder::default(), &bytes, most, |_, _, payload| {
                let _ = wire::decode_map(payload);
            });
        }
        let _ = wire::decode_map(&bytes);
    }
}
