//! The bounded memory of one output stream: the newest bytes of it, addressed by their offset from its start.

/// Bytes `start..end` of a stream. Memory is taken as output comes, up to the capacity, and then the oldest bytes go.
pub struct Ring {
    buf: Vec<u8>,
    capacity: usize,
    start: u64,
    end: u64,
}

const FIRST: usize = 4096;

impl Ring {
    pub fn new(capacity: usize) -> Self {
        Self { buf: Vec::new(), capacity: capacity.max(FIRST), start: 0, end: 0 }
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn end(&self) -> u64 {
        self.end
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Memory held.
    pub fn footprint(&self) -> usize {
        self.buf.len()
    }

    fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Bytes that may be written while nothing from `floor` on is overwritten.
    pub fn room(&self, floor: u64) -> usize {
        let kept = self.end.saturating_sub(floor.max(self.start)) as usize;
        self.capacity.saturating_sub(kept)
    }

    /// The two pieces to read into, in order; together at most `room(floor)` and `most`.
    pub fn space(&mut self, floor: u64, most: usize) -> (&mut [u8], &mut [u8]) {
        let room = self.room(floor).min(most);
        let free = self.buf.len() - self.len();
        if room > 0 && self.buf.len() < self.capacity && free * 4 <= self.buf.len() {
            self.grow();
        }
        let size = self.buf.len();
        // Before the buffer is fully grown only what is free in it can be offered, or history would be lost too early.
        let offered = if size < self.capacity { room.min(size - self.len()) } else { room };
        if offered == 0 {
            return (&mut [], &mut []);
        }
        let at = (self.end % size as u64) as usize;
        let (low, high) = self.buf.split_at_mut(at);
        let first = high.len().min(offered);
        let second = (offered - first).min(low.len());
        (high.get_mut(..first).unwrap_or_default(), low.get_mut(..second).unwrap_or_default())
    }

    /// Says how many bytes were put into `space`.
    pub fn advance(&mut self, count: usize) {
        self.end += count as u64;
        self.start = self.start.max(self.end.saturating_sub(self.buf.len() as u64));
    }

    /// Up to `most` bytes from offset `from`, as two pieces.
    pub fn slices(&self, from: u64, most: usize) -> (&[u8], &[u8]) {
        let from = from.clamp(self.start, self.end);
        let count = ((self.end - from) as usize).min(most);
        let size = self.buf.len();
        if count == 0 || size == 0 {
            return (&[], &[]);
        }
        let at = (from % size as u64) as usize;
        let first = count.min(size - at);
        (self.buf.get(at..at + first).unwrap_or_default(), self.buf.get(..count - first).unwrap_or_default())
    }

    /// Keeps only what is there, for a stream that has ended.
    pub fn shrink(&mut self) {
        let (first, second) = self.slices(self.start, self.capacity);
        let kept = [first, second].concat();
        if kept.len() < self.buf.len() {
            self.relay(kept, self.len());
        }
    }

    /// Drops the bytes, keeps the count.
    pub fn clear(&mut self) {
        self.buf = Vec::new();
        self.start = self.end;
    }

    fn grow(&mut self) {
        let (first, second) = self.slices(self.start, self.capacity);
        let kept = [first, second].concat();
        // The fifth doubling and later ones go faster: a flood should not crawl through small reads.
        let factor = if self.buf.len() >= 64 * 1024 { 4 } else { 2 };
        let size = (self.buf.len() * factor).clamp(FIRST, self.capacity);
        self.relay(kept, size);
    }

    fn relay(&mut self, kept: Vec<u8>, size: usize) {
        let mut buf = vec![0; size];
        if size > 0 {
            let at = (self.start % size as u64) as usize;
            let first = kept.len().min(size - at);
            let (head, tail) = kept.split_at(first);
            if let Some(place) = buf.get_mut(at..at + head.len()) {
                place.copy_from_slice(head);
            }
            if let Some(place) = buf.get_mut(..tail.len()) {
                place.copy_from_slice(tail);
            }
        }
        self.buf = buf;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn put(ring: &mut Ring, floor: u64, bytes: &[u8]) -> usize {
        let mut done = 0;
        loop {
            let rest = &bytes[done..];
            let (a, b) = ring.space(floor, rest.len());
            let n = a.len() + b.len();
            if n == 0 {
                return done;
            }
            let cut = a.len();
            a.copy_from_slice(&rest[..cut]);
            b.copy_from_slice(&rest[cut..n]);
            ring.advance(n);
            done += n;
        }
    }

    proptest! {
        #[test]
        fn keeps_the_newest_bytes(capacity in 4096usize..20000, pieces in prop::collection::vec(0usize..9000, 1..20)) {
            let mut ring = Ring::new(capacity);
            let mut all = Vec::new();
            for (i, size) in pieces.into_iter().enumerate() {
                let piece: Vec<u8> = (0..size).map(|n| (n * 7 + i * 13) as u8).collect();
                let end = ring.end();
                // Nothing has to be kept: all is taken.
                let mut taken = 0;
                while taken < piece.len() {
                    let n = put(&mut ring, u64::MAX, &piece[taken..piece.len().min(taken + capacity)]);
                    prop_assert!(n > 0);
                    taken += n;
                }
                prop_assert_eq!(ring.end(), end + piece.len() as u64);
                all.extend_from_slice(&piece);
                let (a, b) = ring.slices(ring.start(), usize::MAX);
                prop_assert_eq!([a, b].concat(), &all[ring.start() as usize..]);
                prop_assert!(all.len() - ring.start() as usize >= all.len().min(capacity).min(ring.footprint()));
            }
            ring.shrink();
            let (a, b) = ring.slices(ring.start(), usize::MAX);
            prop_assert_eq!([a, b].concat(), &all[ring.start() as usize..]);
        }

        #[test]
        fn never_overwrites_from_the_floor_on(capacity in 4096usize..20000, sizes in prop::collection::vec(0usize..9000, 1..20)) {
            let mut ring = Ring::new(capacity);
            let mut written = 0;
            for size in sizes {
                written += put(&mut ring, 0, &vec![1; size]);
                prop_assert_eq!(ring.start(), 0);
                prop_assert!(written <= capacity);
            }
        }
    }
}
