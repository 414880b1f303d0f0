use super::*;

fn page(n: u8) -> Vec<u8> {
    vec![n; 64]
}

fn host(slots: u32) -> Tier {
    Tier::new("host", Arc::new(MemoryStore::new(slots)), slots)
}

fn disk(path: &std::path::Path, slots: u32) -> Tier {
    let (store, contents) = DiskStore::open(path, slots, 64).unwrap();
    Tier::new("disk", Arc::new(store), slots).with_contents(contents)
}

fn keep(tiers: &mut Tiers, n: u8) {
    tiers.keep(n.into(), |take| take(&page(n)));
    tiers.check(std::iter::empty()).unwrap();
}

/// What the tiers have under a key.
fn read(tiers: &Tiers, key: u8) -> Option<(usize, Vec<u8>)> {
    let slot = tiers.find(key.into())?;
    let mut found = Vec::new();
    let mut take = |bytes: &[u8]| {
        found.extend_from_slice(bytes);
        Ok(())
    };
    tiers.store(slot).get(slot.at, Some(key.into()), &mut take).ok()?;
    Some((slot.tier, found))
}

#[test]
fn what_was_not_used_for_the_longest_falls_to_the_tier_below() {
    let dir = tempfile::tempdir().unwrap();
    let mut tiers = Tiers::new(vec![host(2), disk(&dir.path().join("pages"), 2)]);
    for n in 1..=3 {
        keep(&mut tiers, n);
    }
    assert_eq!(read(&tiers, 1), Some((1, page(1))));
    assert_eq!(read(&tiers, 2), Some((0, page(2))));
    // A second time it is only used again.
    keep(&mut tiers, 2);
    keep(&mut tiers, 4);
    assert_eq!(read(&tiers, 3), Some((1, page(3))));
    assert_eq!(read(&tiers, 2), Some((0, page(2))));
    keep(&mut tiers, 5);
    assert_eq!((read(&tiers, 1), read(&tiers, 2)), (None, Some((1, page(2)))));
}

#[test]
fn held_slots_are_not_given_to_others() {
    let mut tiers = Tiers::new(vec![host(2)]);
    keep(&mut tiers, 1);
    let first = tiers.find(1).unwrap();
    tiers.hold(first);
    let second = tiers.take().unwrap();
    assert_eq!((tiers.take(), tiers.room()), (None, 0));
    tiers.check([first, second].into_iter()).unwrap();
    assert!(tiers.check([first].into_iter()).is_err(), "a slot too many is held");
    tiers.keep(2, |take| take(&page(2)));
    assert_eq!(read(&tiers, 2), None);
    tiers.let_go(first);
    tiers.let_go(second);
    tiers.check(std::iter::empty()).unwrap();
    assert_eq!((read(&tiers, 1), tiers.room()), (Some((0, page(1))), 2));
}

#[test]
fn a_file_serves_what_it_held_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    let mut tiers = Tiers::new(vec![disk(&path, 3)]);
    for n in 1..=4 {
        keep(&mut tiers, n);
    }
    // A page of a request, which nobody asks for again.
    let own = tiers.take().unwrap();
    tiers.store(own).put(own.at, None, &page(9)).unwrap();
    drop(tiers);
    let mut tiers = Tiers::new(vec![disk(&path, 3)]);
    tiers.check(std::iter::empty()).unwrap();
    assert_eq!([1, 2, 3, 4].map(|n| read(&tiers, n).is_some()), [false, false, true, true]);
    // The oldest still goes first.
    keep(&mut tiers, 5);
    keep(&mut tiers, 6);
    assert_eq!([3, 4, 5, 6].map(|n| read(&tiers, n).is_some()), [false, true, true, true]);
}

#[test]
fn no_flipped_or_torn_byte_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    drop(Tiers::new(vec![{
        let (store, _) = DiskStore::open(&path, 1, 64).unwrap();
        store.put(0, Some(7), &page(7)).unwrap();
        Tier::new("disk", Arc::new(store), 1)
    }]));
    let good = std::fs::read(&path).unwrap();
    let mut wrong = 0;
    for at in 512..good.len() {
        // What lies between digest and page means nothing.
        let matters = !(512 + 56..1024).contains(&at);
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        std::fs::write(&path, &bad).unwrap();
        let served = read(&Tiers::new(vec![disk(&path, 1)]), 7);
        assert_eq!(served.is_none(), matters, "byte {at}");
        wrong += usize::from(matters);
        std::fs::write(&path, &good[..at]).unwrap();
        assert_eq!(read(&Tiers::new(vec![disk(&path, 1)]), 7), None, "cut at {at}");
    }
    assert_eq!(wrong, 56 + 64);
}

#[test]
fn a_file_is_ours_alone_of_our_size_and_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    let message = |slots, bytes| DiskStore::open(&path, slots, bytes).unwrap_err().to_string();
    std::fs::write(&path, "somebody's letter").unwrap();
    assert!(message(2, 64).contains("is no file of cached pages"));
    assert_eq!(std::fs::read(&path).unwrap(), b"somebody's letter");
    std::fs::remove_file(&path).unwrap();
    let mut tiers = Tiers::new(vec![disk(&path, 4)]);
    assert!(message(2, 64).contains("another process uses it"));
    (1..=9).for_each(|n| keep(&mut tiers, n));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 512 + 4 * (512 + 64));
    drop(tiers);
    // Smaller, it keeps what lies within; for other pages it begins anew.
    drop(disk(&path, 2));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 512 + 2 * (512 + 64));
    let (_, contents) = DiskStore::open(&path, 2, 128).unwrap();
    assert!(contents.is_empty());
    assert!(DiskStore::open(&dir.path().join("no/such/place"), 2, 64).is_err());
}

/// A disk that is full.
#[derive(Debug)]
struct Full;

impl PageStore for Full {
    fn put(&self, _: u32, _: Option<Key>, _: &[u8]) -> Result<()> {
        Err(ResourceError::internal("no space left on device"))
    }
    fn get(&self, _: u32, _: Option<Key>, _: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        Err(ResourceError::internal("nothing is here"))
    }
}

#[test]
fn a_full_disk_keeps_nothing_and_loses_no_slot() {
    let mut tiers = Tiers::new(vec![host(1), Tier::new("disk", Arc::new(Full), 2)]);
    keep(&mut tiers, 1);
    keep(&mut tiers, 2);
    assert_eq!((read(&tiers, 1), read(&tiers, 2)), (None, Some((0, page(2)))));
    assert_eq!((tiers.failures, tiers.room()), (1, 3));
}
