//! The page ledger against a plain pool: references counted by hand, one queue in the order of
//! use, names in a map. With least recently used the two hand out the very same ids.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

use rootstock::ledger::{About, Complete, ContentHash, LedgerConfig, LedgerError, PageLedger};
use rootstock::radix::{Fate, Hints, PolicyKind, TenantId, Ttl};

const SECOND: u64 = 1_000_000_000;

/// What engines do in a few lines of their own.
struct Plain {
    queue: VecDeque<u32>,
    uses: Vec<u32>,
    names: BTreeMap<u32, ContentHash>,
    pages: BTreeMap<ContentHash, u32>,
}

impl Plain {
    fn new(pages: u32) -> Self {
        Self {
            queue: (1..=pages).collect(),
            uses: vec![0; pages as usize + 1],
            names: BTreeMap::new(),
            pages: BTreeMap::new(),
        }
    }

    fn find(&self, names: &[ContentHash]) -> Vec<u32> {
        names
            .iter()
            .map_while(|name| self.pages.get(name).copied())
            .collect()
    }

    fn touch(&mut self, pages: &[u32]) {
        for &page in pages {
            if self.uses[page as usize] == 0 {
                self.queue.retain(|&one| one != page);
            }
            self.uses[page as usize] += 1;
        }
    }

    fn allocate(&mut self, count: usize) -> Option<Vec<u32>> {
        if count > self.queue.len() {
            return None;
        }
        let got: Vec<u32> = self.queue.drain(..count).collect();
        for &page in &got {
            if let Some(name) = self.names.remove(&page) {
                self.pages.remove(&name);
            }
            self.uses[page as usize] = 1;
        }
        Some(got)
    }

    fn cache(&mut self, pages: &[u32], names: &[ContentHash]) {
        for (&page, name) in pages.iter().zip(names) {
            if !self.pages.contains_key(name) {
                self.pages.insert(*name, page);
                self.names.insert(page, *name);
            }
        }
    }

    fn free(&mut self, pages: impl Iterator<Item = u32>) {
        let mut first = Vec::new();
        for page in pages {
            self.uses[page as usize] -= 1;
            if self.uses[page as usize] > 0 {
                continue;
            }
            if self.names.contains_key(&page) {
                self.queue.push_back(page);
            } else {
                first.push(page);
            }
        }
        first
            .into_iter()
            .rev()
            .for_each(|page| self.queue.push_front(page));
    }
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// The chained names of a prompt whose pages have these contents.
fn names_of(contents: &[u64]) -> Vec<ContentHash> {
    let mut chain: u64 = 0x9e37;
    let mut name = |&content: &u64| {
        chain = (chain ^ content.wrapping_add(1)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        chain ^= chain >> 29;
        let [a, b, c, d, e, f, g, h] = chain.to_le_bytes();
        let low = u32::from_le_bytes([a, b, c, d]);
        let high = u32::from_le_bytes([e, f, g, h]);
        [low, high, 7, 0, 0, 0, 0, low ^ high]
    };
    contents.iter().map(&mut name).collect()
}

fn ledger(pages: u32, policy: PolicyKind) -> PageLedger {
    let config = LedgerConfig {
        pages,
        policy,
        pin_budget: 0.5,
        request_pages: 0,
    };
    PageLedger::new(&config).expect("a ledger of these sizes")
}

fn find(ledger: &mut PageLedger, names: &[ContentHash]) -> Vec<u32> {
    ledger.find(names.len(), |at| names[at]).to_vec()
}

/// The pages of a request from `cached` on, as those to be named; `words` are of all of it.
fn complete<'a>(
    pages: &'a [u32],
    cached: usize,
    words: &'a [u32],
    about: Option<&'a About>,
) -> Complete<'a> {
    Complete {
        cached,
        after: cached.checked_sub(1).map(|at| pages[at]),
        pages: &pages[cached..],
        words: &words[cached * 8..],
        about,
    }
}

/// Looks up, keeps, allocates the rest and names it; the pages, or what is short.
fn admit(
    ledger: &mut PageLedger,
    names: &[ContentHash],
    about: Option<&About>,
    now: u64,
) -> Result<Vec<u32>, LedgerError> {
    let mut pages = find(ledger, names);
    let cached = pages.len();
    ledger.touch(&pages, now)?;
    let rest = u32::try_from(names.len() - cached).expect("a short prompt");
    if let Err(short) = ledger.allocate(rest, now, &mut pages, &mut Vec::new()) {
        pages.reverse();
        ledger.free(&pages, Fate::Keep, now)?;
        return Err(short);
    }
    let words: Vec<u32> = names.iter().flatten().copied().collect();
    ledger.cache(complete(&pages, cached, &words, about), now)?;
    Ok(pages)
}

fn end(ledger: &mut PageLedger, pages: &[u32], now: u64) {
    let back: Vec<u32> = pages.iter().rev().copied().collect();
    let freed = ledger.free(&back, Fate::Keep, now);
    freed.expect("what was admitted can be freed");
}

#[test]
fn least_recently_used_hands_out_the_same_ids_as_a_plain_pool() {
    for seed in 1..10 {
        let mut rng = Rng(seed * 0x9e37_79b9);
        let total = 12 + u32::try_from(rng.below(30)).unwrap();
        let (mut ledger, mut plain) = (ledger(total, PolicyKind::Lru), Plain::new(total));
        let mut running: Vec<Vec<u32>> = Vec::new();
        for now in 0..400 {
            if rng.below(3) > 0 {
                let contents: Vec<u64> = (0..1 + rng.below(8)).map(|_| rng.below(2)).collect();
                let names = names_of(&contents);
                let found = find(&mut ledger, &names);
                assert_eq!(found, plain.find(&names), "seed {seed} at {now}");
                let open = usize::try_from(rng.below(3)).unwrap();
                let more = names.len() + open - found.len();
                ledger.touch(&found, now).unwrap();
                plain.touch(&found);
                let (mut pages, mut gone) = (found.clone(), Vec::new());
                let count = u32::try_from(more).unwrap();
                let got = ledger.allocate(count, now, &mut pages, &mut gone);
                let expected = plain.allocate(more);
                assert_eq!(got.is_ok(), expected.is_some(), "seed {seed} at {now}");
                assert_eq!(pages[found.len()..], expected.unwrap_or_default()[..]);
                if got.is_ok() {
                    let words: Vec<u32> = names.iter().flatten().copied().collect();
                    let full = &pages[..names.len()];
                    let new = complete(full, found.len(), &words, None);
                    ledger.cache(new, now).unwrap();
                    plain.cache(&pages[found.len()..names.len()], &names[found.len()..]);
                }
                running.push(pages);
            } else if !running.is_empty() {
                let at = usize::try_from(rng.below(running.len() as u64)).unwrap();
                let pages = running.swap_remove(at);
                end(&mut ledger, &pages, now);
                plain.free(pages.iter().rev().copied());
            }
            ledger.check().unwrap();
            assert_eq!(ledger.available() as usize, plain.queue.len());
            for (page, uses) in plain.uses.iter().enumerate().skip(1) {
                assert_eq!(ledger.counts()[page].load(Ordering::Relaxed), *uses);
            }
        }
        running.iter().for_each(|pages| end(&mut ledger, pages, 0));
        assert_eq!(ledger.available(), total);
        assert!(ledger.reset(0));
        ledger.check().unwrap();
    }
}

#[test]
fn pages_freed_in_any_order_are_all_had_again() {
    for policy in [PolicyKind::Lru, PolicyKind::Agent, PolicyKind::Priority] {
        let mut rng = Rng(77);
        let mut ledger = ledger(24, policy);
        for now in 0..400 {
            let contents: Vec<u64> = (0..1 + rng.below(6)).map(|_| rng.below(2)).collect();
            let names = names_of(&contents);
            let mut two = vec![admit(&mut ledger, &names, None, now).unwrap()];
            two.push(admit(&mut ledger, &names, None, now).unwrap());
            let mut pages = two.concat();
            while !pages.is_empty() {
                let at = usize::try_from(rng.below(pages.len() as u64)).unwrap();
                ledger
                    .free(&[pages.swap_remove(at)], Fate::Keep, now)
                    .unwrap();
                ledger.check().unwrap();
            }
            assert_eq!(ledger.available(), 24, "everything is idle again");
        }
    }
}

#[test]
fn a_page_computed_twice_stays_with_its_request_and_is_free_with_it() {
    let mut ledger = ledger(8, PolicyKind::Lru);
    let names = names_of(&[1, 2, 3, 4]);
    let words: Vec<u32> = names.iter().flatten().copied().collect();
    let first = admit(&mut ledger, &names[..3], None, 0).unwrap();
    // The last page is computed again, as engines do that need its output; then one more.
    let mut second = ledger.find(2, |at| names[at]).to_vec();
    ledger.touch(&second, 0).unwrap();
    ledger.allocate(2, 0, &mut second, &mut Vec::new()).unwrap();
    for (cached, full, new) in [(2, 3, 0), (3, 4, 1)] {
        let named = complete(&second[..full], cached, &words, None);
        assert_eq!(ledger.cache(named, 0).unwrap(), new);
    }
    assert_eq!(ledger.hash_of(second[2]), None);
    assert_eq!(ledger.stats().duplicate_pages, 1);
    let whole = [&first[..], &second[3..]].concat();
    assert_eq!(find(&mut ledger, &names), whole);
    // What the first computed is needed by what the second put below it.
    end(&mut ledger, &first, 0);
    ledger.check().unwrap();
    assert_eq!(ledger.available(), 3);
    end(&mut ledger, &second, 0);
    ledger.check().unwrap();
    assert_eq!(ledger.available(), 8);
    let third = admit(&mut ledger, &names, None, 0).unwrap();
    assert_eq!(third, whole, "touching what has another parent works too");
    end(&mut ledger, &third, 0);
    ledger.check().unwrap();
}

#[test]
fn what_is_in_use_is_never_handed_out_whatever_is_freed_first() {
    let mut ledger = ledger(4, PolicyKind::Lru);
    let names = names_of(&[1, 2, 3]);
    let one = admit(&mut ledger, &names, None, 0).unwrap();
    // The head goes back first: its page is still needed below what is in use.
    ledger.free(&one[..1], Fate::Keep, 0).unwrap();
    let short = ledger.allocate(2, 0, &mut Vec::new(), &mut Vec::new());
    assert_eq!(short, Err(LedgerError::Short { asked: 2, free: 1 }));
    ledger.free(&[one[2], one[1]], Fate::Keep, 0).unwrap();
    assert_eq!(ledger.available(), 4);
}

#[test]
fn a_page_freed_twice_is_refused_by_its_number() {
    let mut ledger = ledger(4, PolicyKind::Lru);
    let pages = admit(&mut ledger, &names_of(&[5]), None, 0).unwrap();
    end(&mut ledger, &pages, 0);
    let page = pages[0];
    assert_eq!(
        ledger.free(&pages, Fate::Keep, 0),
        Err(LedgerError::NotHeld { page })
    );
    let unknown = ledger.touch(&[9], 0);
    assert_eq!(unknown, Err(LedgerError::Unknown { page: 9, last: 4 }));
    ledger.check().unwrap();
}

/// The head of a request is freed, and then the whole: the second time it has no user left.
#[test]
fn a_page_freed_twice_within_a_request_is_refused_and_the_counts_still_add_up() {
    let mut ledger = ledger(8, PolicyKind::Lru);
    let names = names_of(&[1, 2]);
    let pages = admit(&mut ledger, &names, None, 0).unwrap();
    ledger.free(&pages[..1], Fate::Keep, 0).unwrap();
    let back = [pages[1], pages[0]];
    let error = ledger.free(&back, Fate::Keep, 0).unwrap_err();
    assert_eq!(error, LedgerError::NotHeld { page: pages[0] });
    ledger.check().unwrap();
    assert_eq!(ledger.available(), 8, "all are back, once");
    // Another user of it keeps it.
    ledger.touch(&pages, 1).unwrap();
    ledger.check().unwrap();
    assert_eq!(ledger.available(), 6);
}

#[test]
fn bad_content_is_not_found_again_until_it_is_computed_again() {
    let mut ledger = ledger(4, PolicyKind::Lru);
    let names = names_of(&[1, 2, 3]);
    let pages = admit(&mut ledger, &names, None, 0).unwrap();
    end(&mut ledger, &pages, 0);
    assert_eq!(find(&mut ledger, &names), pages);
    assert_eq!(ledger.spoil(pages[1]), Some(names[1]));
    assert_eq!(find(&mut ledger, &names), pages[..1]);
    assert_eq!(ledger.page_of(&names[1]), None);
    let all = {
        let (mut out, mut gone) = (Vec::new(), Vec::new());
        ledger.allocate(4, 0, &mut out, &mut gone).unwrap();
        assert_eq!(gone.len(), 2, "what is bad was told already");
        out
    };
    ledger.free(&all, Fate::Keep, 0).unwrap();
    let again = admit(&mut ledger, &names, None, 0).unwrap();
    assert_eq!(find(&mut ledger, &names), again);
}

fn about(hints: Hints, names: &[ContentHash]) -> About {
    let tokens = u32::try_from(names.len() * 16).expect("a short prompt");
    About::new(hints, TenantId(0), tokens, 16)
}

#[test]
fn pinned_pages_are_not_counted_and_outlive_a_flood() {
    let mut ledger = ledger(16, PolicyKind::Lru);
    let names = names_of(&[1, 2, 3, 4]);
    let ttl = Ttl {
        seconds: 60,
        clamped: false,
    };
    let hints = Hints {
        pins: vec![(u32::MAX, ttl)],
        ..Hints::default()
    };
    let pages = admit(&mut ledger, &names, Some(&about(hints, &names)), 0).unwrap();
    end(&mut ledger, &pages, 0);
    assert_eq!(ledger.available(), 12);
    for flood in 10..40 {
        let other = names_of(&[flood; 6]);
        let pages = admit(&mut ledger, &other, None, 1).unwrap();
        end(&mut ledger, &pages, 1);
    }
    assert_eq!(find(&mut ledger, &names), pages);
    ledger.tick(61 * SECOND);
    assert_eq!(ledger.available(), 16, "the pin has ended");
}

#[test]
fn pins_leave_room_for_the_longest_request() {
    let config = LedgerConfig {
        pages: 10,
        policy: PolicyKind::Lru,
        pin_budget: 1.0,
        request_pages: 8,
    };
    let mut ledger = PageLedger::new(&config).unwrap();
    let names = names_of(&[1, 2, 3, 4, 5]);
    let ttl = Ttl {
        seconds: 60,
        clamped: false,
    };
    let hints = Hints {
        pins: vec![(u32::MAX, ttl)],
        ..Hints::default()
    };
    let pages = admit(&mut ledger, &names, Some(&about(hints, &names)), 0).unwrap();
    end(&mut ledger, &pages, 0);
    assert_eq!(ledger.available(), 8);
}

#[test]
fn what_has_priority_stays_and_a_finished_program_goes_first() {
    let mut ledger = ledger(12, PolicyKind::Priority);
    let kinds = [(1, 5, false), (2, 0, true), (3, 0, false)];
    for (content, priority, session_final) in kinds {
        let names = names_of(&[content; 4]);
        let hints = Hints {
            priority,
            session_final,
            program: Some(format!("p{content}")),
            ..Hints::default()
        };
        let pages = admit(&mut ledger, &names, Some(&about(hints, &names)), 0).unwrap();
        end(&mut ledger, &pages, 0);
    }
    let mut count = |content: u64| find(&mut ledger, &names_of(&[content; 4])).len();
    assert_eq!([count(1), count(2), count(3)], [4, 4, 4]);
    let first = admit(&mut ledger, &names_of(&[7; 4]), None, 1).unwrap();
    let mut count = |content: u64| find(&mut ledger, &names_of(&[content; 4])).len();
    assert_eq!([count(1), count(2), count(3)], [4, 0, 4]);
    end(&mut ledger, &first, 1);
    admit(&mut ledger, &names_of(&[8; 8]), None, 2).unwrap();
    let mut count = |content: u64| find(&mut ledger, &names_of(&[content; 4])).len();
    assert_eq!([count(1), count(3)], [4, 0]);
}

#[test]
fn a_lookup_is_repeated_from_memory_until_the_cache_changes() {
    let mut ledger = ledger(8, PolicyKind::Lru);
    let names = names_of(&[1, 2, 3]);
    let pages = admit(&mut ledger, &names, None, 0).unwrap();
    let mut read = 0;
    for _ in 0..5 {
        let found = ledger.find(3, |at| {
            read += 1;
            names[at]
        });
        assert_eq!(found, pages);
    }
    // The first reads its last name and then all of them, the others their last alone.
    assert_eq!(read, 4 + 4);
    admit(&mut ledger, &names_of(&[9]), None, 0).unwrap();
    ledger.find(3, |at| {
        read += 1;
        names[at]
    });
    assert_eq!(read, 12);
}
