//! The tokens of a request, of which a step touches no memory of their own.

use device::prefetch;

/// Tokens in a cache line.
const TAIL: usize = 16;

/// A list of tokens that grows at its end. The last ones, up to the next multiple of [`TAIL`], lie in
/// the value itself and move to the list together: a step writes to memory that it touches anyway, and
/// not to a list of each request's own.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Tokens {
    tail: [u32; TAIL],
    len: u32,
    last: u32,
    /// All but those of the tail.
    list: Vec<u32>,
}

impl Tokens {
    /// These tokens, with memory for `capacity` in all. It is touched here, so that no step waits for the
    /// operating system to find it.
    pub(crate) fn new(tokens: &[u32], capacity: usize) -> Self {
        let mut list = Vec::with_capacity(capacity);
        list.extend_from_slice(tokens);
        list.resize(list.capacity(), 0);
        list.truncate(tokens.len());
        let mut new = Tokens { list, ..Self::default() };
        new.listed();
        new
    }

    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// How many there is memory for.
    pub(crate) fn capacity(&self) -> usize {
        self.list.capacity()
    }

    /// The last one; 0 where there is none.
    #[inline]
    pub(crate) fn last(&self) -> u32 {
        self.last
    }

    #[inline]
    pub(crate) fn push(&mut self, token: u32) {
        let at = self.len as usize - self.list.len();
        self.tail[at % TAIL] = token;
        (self.len, self.last) = (self.len + 1, token);
        if (self.len as usize).is_multiple_of(TAIL) {
            self.flush();
        }
    }

    pub(crate) fn extend(&mut self, tokens: &[u32]) {
        self.flush();
        self.list.extend_from_slice(tokens);
        self.listed();
    }

    pub(crate) fn truncate(&mut self, len: u32) {
        self.flush();
        self.list.truncate(len as usize);
        self.listed();
    }

    /// All of them.
    pub(crate) fn all(&mut self) -> &[u32] {
        self.flush();
        &self.list
    }

    /// The last [`TAIL`], when there are a multiple of so many.
    #[inline]
    pub(crate) fn last_block(&self) -> Option<&[u32; TAIL]> {
        match self.list.len() == self.len as usize && self.list.len().is_multiple_of(TAIL) {
            true => self.list.last_chunk(),
            false => None,
        }
    }

    /// Asks for the memory that the tail moves to.
    #[inline]
    pub(crate) fn warm(&mut self) {
        let room = self.list.spare_capacity_mut();
        room.first().into_iter().chain(room.get(TAIL - 1)).for_each(prefetch);
    }

    #[inline]
    fn flush(&mut self) {
        let count = self.len as usize - self.list.len();
        self.list.extend_from_slice(&self.tail[..count.min(TAIL)]);
    }

    /// The list has all of them.
    fn listed(&mut self) {
        self.len = self.list.len() as u32;
        self.last = self.list.last().copied().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_those_of_a_plain_list() {
        let mut random = 7u32;
        let mut next = |below: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) % below
        };
        for first in [0, 1, 15, 16, 17, 40] {
            let mut list: Vec<u32> = (0..first).collect();
            let mut tokens = Tokens::new(&list, 50);
            for n in 0..2_000 {
                match next(20) {
                    0 => {
                        let more: Vec<u32> = (0..next(40)).collect();
                        tokens.extend(&more);
                        list.extend(more);
                    }
                    1 => {
                        let len = next(list.len() as u32 + 3);
                        tokens.truncate(len);
                        list.truncate(len as usize);
                    }
                    2 => assert_eq!(tokens.all(), list),
                    _ => {
                        tokens.push(n);
                        list.push(n);
                    }
                }
                assert_eq!(tokens.len() as usize, list.len());
                assert_eq!(tokens.last(), list.last().copied().unwrap_or(0));
                if list.len().is_multiple_of(TAIL) {
                    let block = tokens.last_block().map(|block| &block[..]);
                    assert_eq!(block, list.len().checked_sub(TAIL).map(|from| &list[from..]));
                }
            }
            assert_eq!(tokens.all(), list);
        }
    }
}
