use super::*;

fn page(n: u8) -> Vec<u8> {
    vec![n; 64]
}

fn host(slots: u32) -> Tier {
    Tier::new("host", Arc::new(MemoryStore::new(slots)), slots)
}

fn open(path: &std::path::Path, slots: u32, bytes: u64) -> Result<disk::Opened> {
    DiskStore::open(path, slots, bytes, Arc::new(Mutex::new(Origins::new(slots, 4).unwrap())))
}

fn disk(path: &std::path::Path, slots: u32) -> Tier {
    let opened = open(path, slots, 64).unwrap();
    Tier::new("disk", Arc::new(opened.store), slots).with_contents(opened.contents)
}

fn keep(tiers: &mut Tiers, n: u8) {
    let key = n.into();
    if let Some((slot, fall)) = tiers.take_for(key) {
        tiers.check(std::iter::empty()).unwrap();
        fall.iter().for_each(|fall| fall.copy());
        let put = tiers.store(slot).put(slot.at, Some(key), &page(n));
        fall.iter().for_each(|fall| tiers.fallen(fall));
        tiers.kept(slot, key, put.err().as_ref());
    }
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
    let (second, _) = tiers.take(1).unwrap();
    assert!(tiers.take(1).is_none() && tiers.room() == 0);
    tiers.check([first, second].into_iter()).unwrap();
    assert!(tiers.check([first].into_iter()).is_err(), "a slot too many is held");
    assert!(tiers.take_for(2).is_none());
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
    let (own, fall) = tiers.take(1).unwrap();
    fall.iter().for_each(|fall| fall.copy());
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
        let store = open(&path, 1, 64).unwrap().store;
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
    let message = |slots, bytes| open(&path, slots, bytes).unwrap_err().to_string();
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
    assert!(open(&path, 2, 128).unwrap().contents.is_empty());
    assert!(open(&dir.path().join("no/such/place"), 2, 64).is_err());
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

/// A disk that has room for what it has written before, and for nothing else.
#[derive(Debug)]
struct NoMore(MemoryStore, u32);

impl PageStore for NoMore {
    fn put(&self, slot: u32, key: Option<Key>, page: &[u8]) -> Result<()> {
        match slot < self.1 {
            true => self.0.put(slot, key, page),
            false => Err(ResourceError::new(ErrorKind::EXHAUSTED, "no space left on device")),
        }
    }
    fn get(
        &self,
        slot: u32,
        key: Option<Key>,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        self.0.get(slot, key, take)
    }
}

#[test]
fn a_disk_that_has_become_full_goes_on_with_the_room_that_it_has() {
    let mut tiers =
        Tiers::new(vec![Tier::new("disk", Arc::new(NoMore(MemoryStore::new(9), 3)), 9)]);
    (1..=8).for_each(|n| keep(&mut tiers, n));
    // The fourth was lost, and those after it took the places of those not used for the longest.
    let kept = |tiers: &Tiers| (1..=8).filter(|&n| read(tiers, n).is_some()).collect::<Vec<_>>();
    assert_eq!((kept(&tiers), tiers.failures), (vec![6, 7, 8], 1));
    // In time it is tried again, and not with every page.
    (0..3 * REUSED).for_each(|n| keep(&mut tiers, 20 + (n % 90) as u8));
    assert!((3..=4).contains(&tiers.failures), "{}", tiers.failures);
}

#[test]
fn a_file_that_was_cut_or_written_over_while_it_is_used_is_ours_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    let mut tiers = Tiers::new(vec![disk(&path, 4)]);
    (1..=2).for_each(|n| keep(&mut tiers, n));
    let cut = |len| {
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
    };
    // The last is what a write in the midst of which it is cut leaves.
    for (len, grown) in [(0, 0), (100, 100), (512, 512), (600, 600), (0, 3_000)] {
        cut(len);
        cut(grown);
        assert_eq!((read(&tiers, 1), read(&tiers, 2)), (None, None), "cut to {len}");
        keep(&mut tiers, 3);
        tiers.forget(tiers.find(3).unwrap());
        keep(&mut tiers, 3);
        assert_eq!(read(&tiers, 3), Some((0, page(3))), "cut to {len}");
        drop(tiers);
        tiers = Tiers::new(vec![disk(&path, 4)]);
        tiers.check(std::iter::empty()).unwrap();
        assert_eq!(read(&tiers, 3), Some((0, page(3))), "cut to {len}, started again");
    }
    // Another process's pages, which are under other keys.
    let other = dir.path().join("other");
    let mut others = Tiers::new(vec![disk(&other, 4)]);
    (101..=104).for_each(|n| keep(&mut others, n));
    drop(others);
    let all = std::fs::read(&other).unwrap();
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::OpenOptions::new().write(true).open(&path).unwrap(),
        &all,
        0,
    )
    .unwrap();
    assert_eq!(read(&tiers, 3), None);
    // One that lies where the file was is nothing to those who have it open.
    keep(&mut tiers, 5);
    std::fs::rename(&other, &path).unwrap();
    assert_eq!(read(&tiers, 5), Some((0, page(5))));
}

#[test]
fn what_keys_are_made_of_comes_back_where_the_key_proves_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    let parent: Link = std::array::from_fn(|i| i as u32 * 77);
    let origin = |tokens: &[u32]| Origin { parent, tokens: tokens.into() };
    let all = [origin(&[5, 6, 7, 8]), origin(&[5, 9])];
    let key = |origin: &Origin| crate::keys::short(&crate::keys::link(&parent, &origin.tokens));
    let opened = open(&path, 4, 64).unwrap();
    for (slot, origin) in all.iter().enumerate() {
        opened.store.origins().note(key(origin), &parent, &origin.tokens);
        opened.store.put(slot as u32, Some(key(origin)), &page(slot as u8)).unwrap();
    }
    opened.store.put(2, Some(99), &page(2)).unwrap();
    drop(opened);
    assert_eq!(open(&path, 4, 64).unwrap().found, all);
    // A page that is evicted again takes it along again.
    let opened = open(&path, 4, 64).unwrap();
    opened.store.put(3, Some(key(&all[0])), &page(0)).unwrap();
    opened.store.put(0, Some(98), &page(0)).unwrap();
    drop(opened);
    assert_eq!(open(&path, 4, 64).unwrap().found, [all[1].clone(), all[0].clone()]);
    // Whatever byte of it is flipped: what is there is not told, and the page is still served.
    let good = std::fs::read(&path).unwrap();
    let block = 512 + 512 + 64;
    for at in 56..56 + 4 + 32 + 8 {
        let mut bad = good.clone();
        bad[block + at] ^= 0x10;
        std::fs::write(&path, &bad).unwrap();
        let opened = open(&path, 4, 64).unwrap();
        assert_eq!(opened.found, [all[0].clone()], "byte {at}");
        let mut served = Vec::new();
        let mut take = |bytes: &[u8]| {
            served.extend_from_slice(bytes);
            Ok(())
        };
        opened.store.get(1, Some(key(&all[1])), &mut take).unwrap();
        assert_eq!(served, page(1));
    }
}
