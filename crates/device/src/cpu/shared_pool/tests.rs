//! Storing, reading and copying, alone and from several threads.

use super::*;
use crate::cpu::attention::tests::dot_some;

const TYPES: [PoolType; 4] = [PoolType::F32, PoolType::F16, PoolType::BF16, PoolType::E4M3];

#[test]
fn what_is_stored_is_read() {
    for element in TYPES {
        let pool = SharedPool::new(1000, element).unwrap();
        let view = pool.view();
        assert_eq!((view.len(), view.element()), (1000, element));
        // Small integers are exact in every type.
        let row: Vec<f32> = (0..300).map(|i| (i % 31) as f32 - 15.0).collect();
        view.writer().store(7, &row).unwrap();
        view.writer().copy(7..307, 600).unwrap();
        let mut all = vec![f32::NAN; 1000];
        view.reader().load(0, &mut all).unwrap();
        for (i, &got) in all.iter().enumerate() {
            let want = match i {
                7..307 => row[i - 7],
                600..900 => row[i - 600],
                _ => 0.0,
            };
            assert_eq!(got, want, "element {i}");
        }
        let bytes = view.reader().bytes(7..307).unwrap().to_vec();
        assert_eq!(bytes.len(), 300 * element.bytes());
        view.writer().store_bytes(310, &bytes).unwrap();
        let mut again = vec![0.0; 300];
        view.reader().load(310, &mut again).unwrap();
        assert_eq!(again, row);

        let reader = view.reader();
        let rows = reader.rows(7, 3, 64, 100).unwrap();
        let mut scores = [0.0; 3];
        dot_some(&[1.0; 64], 1, rows, 3, &mut scores, 3);
        let want: Vec<f32> = row.chunks(100).map(|r| r[..64].iter().sum()).collect();
        assert_eq!(scores.as_slice(), want);
    }
}

#[test]
fn ranges_are_checked() {
    for element in TYPES {
        let pool = SharedPool::new(100, element).unwrap();
        {
            let writer = pool.view().writer();
            assert!(writer.store(99, &[0.0; 2]).is_err());
            assert!(writer.store(usize::MAX, &[0.0; 2]).is_err());
            assert!(writer.store_bytes(0, &[0; 401]).is_err());
            assert!(writer.store_bytes(99, &[0; 8]).is_err());
            assert!(writer.copy(90..101, 0).is_err());
            assert!(writer.copy(0..11, 90).is_err());
            assert_eq!(writer.store(100, &[]), Ok(()));
        }
        let reader = pool.view().reader();
        assert!(reader.load(98, &mut [0.0; 3]).is_err());
        assert!(reader.rows(0, 2, 50, 51).is_err());
        assert!(reader.rows(0, 3, 1, usize::MAX).is_err());
        assert!(reader.rows(0, 2, usize::MAX, 1).is_err());
        assert!(reader.rows(100, 0, 50, 51).is_ok());
        assert!(reader.bytes(0..101).is_err());
    }
    assert!(SharedPool::new(usize::MAX, PoolType::F32).is_err());
    let empty = SharedPool::new(0, PoolType::F32).unwrap();
    assert!(empty.view().is_empty());
    assert_eq!(empty.view().reader().bytes(0..0).unwrap(), b"");
}

/// Readers and writers of one page on several threads: a reader must find every element of a row
/// from the same store, which is so only if nobody writes meanwhile.
#[test]
fn readers_never_see_a_row_in_the_making() {
    let pool = SharedPool::new(4096, PoolType::BF16).unwrap();
    std::thread::scope(|s| {
        for writer in 0..2usize {
            let view = pool.view();
            s.spawn(move || {
                for round in 0..400 {
                    let row = [(round % 256) as f32; 1024];
                    view.writer().store(writer * 2048, &row).unwrap();
                }
            });
        }
        for _ in 0..2 {
            let view = pool.view();
            s.spawn(move || {
                let mut row = [0.0; 1024];
                for _ in 0..400 {
                    for start in [0, 2048] {
                        view.reader().load(start, &mut row).unwrap();
                        assert!(row.iter().all(|&x| x == row[0]));
                    }
                }
            });
        }
    });
}

#[test]
fn another_library_sees_the_same_pool() {
    let pool = SharedPool::new(64, PoolType::F16).unwrap();
    // SAFETY: the pool lives to the end of the test.
    let view = unsafe { PoolView::from_raw(pool.as_raw()) };
    view.writer().store(3, &[1.5, -2.0]).unwrap();
    let mut out = [0.0; 4];
    pool.view().reader().load(2, &mut out).unwrap();
    assert_eq!(out, [0.0, 1.5, -2.0, 0.0]);
}
