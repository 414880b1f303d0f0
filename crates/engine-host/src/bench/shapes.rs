//! Which batch, context and pool sizes are measured.

use std::fmt;
use std::str::FromStr;

use super::rig::{Geometry, PAGE, SLOTS};

/// Batches of the grid.
pub const BATCHES: [u32; 6] = [1, 8, 32, 128, 256, 1024];
/// Contexts of the grid.
pub const CONTEXTS: [u32; 4] = [512, 4096, 16_384, 131_072];
/// Contexts up to this are begun anew after a few steps, so that they stay what they are called.
const SHORT: u32 = 4096;
/// Steps of a population, short and long contexts.
const ROUNDS: [u32; 2] = [272, 2080];

/// How many pages there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pool {
    /// As many as the shape needs.
    Enough,
    /// This many.
    Pages(u32),
}

impl Pool {
    /// Pools of the grid.
    pub const ALL: [Self; 3] = [Self::Enough, Self::Pages(1 << 20), Self::Pages(1 << 24)];
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Enough => f.write_str("enough"),
            Self::Pages(pages) if pages % (1 << 20) == 0 => write!(f, "{}M", pages >> 20),
            Self::Pages(pages) => write!(f, "{pages}"),
        }
    }
}

impl FromStr for Pool {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |digits: &str, unit: u32| {
            digits.parse::<u32>().ok().and_then(|n| n.checked_mul(unit)).filter(|&n| n > 1)
        };
        let pages = match text.strip_suffix(['M', 'm']) {
            _ if text == "enough" => return Ok(Self::Enough),
            Some(digits) => number(digits, 1 << 20),
            None => number(text, 1),
        };
        pages.map(Self::Pages).ok_or_else(|| format!("{text:?} is no pool: enough, 1M or a number"))
    }
}

/// One cell of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Requests.
    pub batch: u32,
    /// Tokens of each when it begins to decode.
    pub context: u32,
    /// Pages there are.
    pub pool: Pool,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "B={} L={} pool={}", self.batch, self.context, self.pool)
    }
}

/// `BxL` or `BxLxPOOL`: `256x4096`, `256x4k`, `256x4kx1M`.
impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no shape: write BATCHxCONTEXT or BATCHxCONTEXTxPOOL");
        let mut parts = text.split('x');
        let mut number = || {
            let part = parts.next()?;
            let (digits, unit) = match part.strip_suffix('k') {
                Some(digits) => (digits, 1024),
                None => (part, 1),
            };
            digits.parse::<u32>().ok()?.checked_mul(unit).filter(|n| (1..=1 << 20).contains(n))
        };
        let (batch, context) = (number().ok_or_else(wrong)?, number().ok_or_else(wrong)?);
        let pool = parts.next().map_or(Ok(Pool::Enough), str::parse)?;
        match parts.next() {
            None if batch <= 1 << 14 => Ok(Self { batch, context, pool }),
            _ => Err(wrong()),
        }
    }
}

impl Shape {
    /// As it is read: `256x4096xenough`.
    pub fn spelled(&self) -> String {
        format!("{}x{}x{}", self.batch, self.context, self.pool)
    }

    /// Steps of one population: it is begun anew after so many.
    pub fn steps(&self) -> u32 {
        ROUNDS[usize::from(self.context > SHORT)]
    }

    /// Pages that the shape needs for `steps` steps.
    pub fn pages(&self, steps: u32) -> u64 {
        let tokens = self.context + steps + PAGE;
        u64::from(self.batch) * u64::from(tokens.div_ceil(PAGE)) + 2
    }

    /// How large the resources are built for the shape alone.
    pub fn geometry(&self, steps: u32) -> Geometry {
        let needed = self.pages(steps).min(u64::from(u32::MAX - 1)) as u32;
        let pages = match self.pool {
            Pool::Enough => needed,
            Pool::Pages(pages) => pages,
        };
        Geometry { pages, max_batch: self.batch, max_len: self.context + steps + 2 * PAGE }
    }
}

/// All cells of the grid with these pools.
pub fn grid(batches: &[u32], contexts: &[u32], pools: &[Pool]) -> Vec<Shape> {
    let mut shapes = Vec::new();
    for &pool in pools {
        for &batch in batches {
            for &context in contexts {
                shapes.push(Shape { batch, context, pool });
            }
        }
    }
    shapes
}

/// Bytes that resources of this size touch: page records and index, page tables and page lists.
pub fn footprint(geometry: Geometry) -> u64 {
    let Geometry { pages, max_batch, max_len } = geometry;
    let rows = u64::from(max_batch + 1) * u64::from(max_len.div_ceil(PAGE));
    u64::from(pages) * 128 + rows * 4 * u64::from(SLOTS + 2)
}

/// Bytes that the machine can still give.
pub fn free_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_as_they_are_written() {
        let shape: Shape = "256x4kx16M".parse().unwrap();
        assert_eq!(shape, Shape { batch: 256, context: 4096, pool: Pool::Pages(1 << 24) });
        assert_eq!(shape.spelled().parse(), Ok(shape));
        assert_eq!("8x512".parse::<Shape>().unwrap().pool, Pool::Enough);
        assert_eq!("8x512x900".parse::<Shape>().unwrap().pool, Pool::Pages(900));
        for bad in ["", "8", "0x512", "8x0", "8x512xfew", "8x512x1Mx2", "8x9999k", "70000x512"] {
            assert!(bad.parse::<Shape>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_pool_that_is_just_enough_holds_every_step() {
        let shape = Shape { batch: 3, context: 500, pool: Pool::Enough };
        let geometry = shape.geometry(100);
        // 500 + 100 tokens are 38 pages.
        assert!(geometry.pages > 3 * 38 && geometry.pages <= 3 * 40 + 2, "{geometry:?}");
        assert!(geometry.max_len >= 600);
    }
}
