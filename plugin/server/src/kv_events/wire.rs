//! Cache events as the messages that Dynamo's router, vLLM's and SGLang's consumers read.
//!
//! A message is MessagePack: `[seconds, [event, ...], data_parallel_rank]`, always three elements.
//!
//! ```text
//! ["BlockStored", [hash, ...], parent | nil, [token, ...], page_tokens, nil, medium, lora | nil,
//!  extra_keys | nil]
//! ["BlockRemoved", [hash, ...], medium]
//! ["AllBlocksCleared"]
//! ```
//! Hashes are chained as `rootstock::radix::KvEvent` says; `medium` is `GPU` for device pages and
//! `CPU` for host pages. The cache salt stands in the extra keys of the first page, in the form
//! `dynamo-cache-salt:SALT`. A replica is a data-parallel rank. All replicas share the host pages,
//! so each of those is told once for every rank.

use rootstock::radix::{EventTier, KvEvent, NamespaceId, NamespaceKey, StoredPage};

/// Events of a message, at most.
const EVENTS_MAX: u32 = 64;
/// A message is closed when it has more bytes.
const MESSAGE_BYTES: usize = 128 << 10;
/// Pages of one event, at most: more go as several, each the parent of the next.
const PAGES_MAX: usize = 512;

const SALT_PREFIX: &str = "dynamo-cache-salt:";

/// Makes messages of events. One rank a message, events of a rank in order.
#[derive(Debug)]
pub(super) struct Batcher {
    seconds: f64,
    ranks: Vec<Open>,
    done: Vec<Vec<u8>>,
    events: u64,
}

/// The message that a rank's next event goes into.
#[derive(Debug, Default)]
struct Open {
    events: u32,
    body: Vec<u8>,
}

impl Batcher {
    /// Nothing yet, for `ranks` replicas, at `seconds` since 1970.
    pub(super) fn new(seconds: f64, ranks: u16) -> Batcher {
        Batcher {
            seconds,
            ranks: (0..ranks.max(1)).map(|_| Open::default()).collect(),
            done: Vec::new(),
            events: 0,
        }
    }

    /// A message without events: it carries a number and nothing else.
    pub(super) fn empty(seconds: f64) -> Vec<u8> {
        message(seconds, 0, &[], 0)
    }

    /// Everything told so far is void.
    pub(super) fn clear_all(&mut self) {
        for rank in 0..self.ranks.len() {
            self.cleared(rank);
        }
    }

    /// Adds an event. `name` knows the namespaces; what is stored under one that is unknown is
    /// gone by now, and left out.
    pub(super) fn add<'a>(
        &mut self,
        event: &KvEvent,
        name: impl Fn(NamespaceId) -> Option<&'a NamespaceKey>,
    ) {
        match event {
            KvEvent::Stored {
                tier,
                ns,
                parent,
                pages,
            } => {
                let Some(name) = name(*ns) else {
                    return;
                };
                let mut parent = *parent;
                for pages in pages.chunks(PAGES_MAX) {
                    let mut body = Vec::new();
                    stored(&mut body, *tier, name, parent, pages);
                    self.put(*tier, &body);
                    parent = pages.last().map(|page| page.sequence_hash);
                }
            }
            KvEvent::Removed { tier, hashes } => {
                for hashes in hashes.chunks(PAGES_MAX) {
                    let mut body = Vec::new();
                    array(&mut body, 3);
                    text(&mut body, "BlockRemoved");
                    array(&mut body, hashes.len());
                    hashes.iter().for_each(|&hash| uint(&mut body, hash));
                    text(&mut body, medium(*tier));
                    self.put(*tier, &body);
                }
            }
            KvEvent::Cleared {
                tier: EventTier::Device(replica),
            } => self.cleared(usize::from(replica.0)),
            // The cache clears all tiers or none, and a clear of a rank is one of all its tiers.
            KvEvent::Cleared {
                tier: EventTier::Host,
            } => {}
            // Whoever feeds this turns gaps into a full account.
            KvEvent::Gap { .. } | _ => {}
        }
    }

    /// The messages, and how many events are in them.
    pub(super) fn finish(mut self) -> (Vec<Vec<u8>>, u64) {
        for rank in 0..self.ranks.len() {
            self.close(rank);
        }
        (self.done, self.events)
    }

    fn cleared(&mut self, rank: usize) {
        let mut body = Vec::new();
        array(&mut body, 1);
        text(&mut body, "AllBlocksCleared");
        self.put_at(rank, &body);
    }

    fn put(&mut self, tier: EventTier, body: &[u8]) {
        match tier {
            EventTier::Device(replica) => self.put_at(usize::from(replica.0), body),
            EventTier::Host => {
                for rank in 0..self.ranks.len() {
                    self.put_at(rank, body);
                }
            }
        }
    }

    fn put_at(&mut self, rank: usize, body: &[u8]) {
        let Some(open) = self.ranks.get_mut(rank) else {
            return;
        };
        open.body.extend_from_slice(body);
        open.events += 1;
        self.events += 1;
        if open.events == EVENTS_MAX || open.body.len() > MESSAGE_BYTES {
            self.close(rank);
        }
    }

    fn close(&mut self, rank: usize) {
        let Some(open) = self.ranks.get_mut(rank).filter(|open| open.events > 0) else {
            return;
        };
        let open = std::mem::take(open);
        let message = message(self.seconds, open.events as usize, &open.body, rank);
        self.done.push(message);
    }
}

fn message(seconds: f64, events: usize, body: &[u8], rank: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len() + 24);
    array(&mut out, 3);
    out.push(0xcb);
    out.extend_from_slice(&seconds.to_be_bytes());
    array(&mut out, events);
    out.extend_from_slice(body);
    uint(&mut out, rank as u64);
    out
}

fn stored(
    out: &mut Vec<u8>,
    tier: EventTier,
    name: &NamespaceKey,
    parent: Option<u64>,
    pages: &[StoredPage],
) {
    let page_tokens = pages.first().map_or(0, |page| page.tokens.len());
    array(out, 9);
    text(out, "BlockStored");
    array(out, pages.len());
    pages.iter().for_each(|page| uint(out, page.sequence_hash));
    match parent {
        Some(hash) => uint(out, hash),
        None => nil(out),
    }
    array(out, pages.len() * page_tokens);
    for page in pages {
        page.tokens
            .iter()
            .for_each(|&token| uint(out, token.into()));
    }
    uint(out, page_tokens as u64);
    nil(out);
    text(out, medium(tier));
    match name.lora.as_deref() {
        Some(lora) if !lora.is_empty() => text(out, lora),
        Some(_) | None => nil(out),
    }
    match name.salt.as_deref() {
        Some(salt) if !salt.is_empty() => {
            array(out, pages.len());
            array(out, 1);
            text(out, &format!("{SALT_PREFIX}{salt}"));
            (1..pages.len()).for_each(|_| nil(out));
        }
        Some(_) | None => nil(out),
    }
}

const fn medium(tier: EventTier) -> &'static str {
    match tier {
        EventTier::Device(_) => "GPU",
        EventTier::Host => "CPU",
    }
}

// MessagePack, as far as it is needed. Lengths are below 2^32: they count what is in memory.

fn nil(out: &mut Vec<u8>) {
    out.push(0xc0);
}

fn uint(out: &mut Vec<u8>, value: u64) {
    let bytes = value.to_be_bytes();
    match value {
        0..0x80 => out.extend_from_slice(&bytes[7..]),
        0x80..0x100 => tagged(out, 0xcc, &bytes[7..]),
        0x100..0x1_0000 => tagged(out, 0xcd, &bytes[6..]),
        0x1_0000..0x1_0000_0000 => tagged(out, 0xce, &bytes[4..]),
        _ => tagged(out, 0xcf, &bytes),
    }
}

fn array(out: &mut Vec<u8>, len: usize) {
    let bytes = (len as u64).to_be_bytes();
    match len {
        0..16 => out.push(0x90 | bytes[7]),
        16..0x1_0000 => tagged(out, 0xdc, &bytes[6..]),
        _ => tagged(out, 0xdd, &bytes[4..]),
    }
}

fn text(out: &mut Vec<u8>, value: &str) {
    let bytes = (value.len() as u64).to_be_bytes();
    match value.len() {
        0..32 => out.push(0xa0 | bytes[7]),
        32..0x100 => tagged(out, 0xd9, &bytes[7..]),
        0x100..0x1_0000 => tagged(out, 0xda, &bytes[6..]),
        _ => tagged(out, 0xdb, &bytes[4..]),
    }
    out.extend_from_slice(value.as_bytes());
}

fn tagged(out: &mut Vec<u8>, tag: u8, bytes: &[u8]) {
    out.push(tag);
    out.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rootstock::memory::ReplicaId;

    /// From MessagePack's specification.
    #[test]
    fn numbers_texts_and_arrays_take_the_shortest_form() {
        let of = |value| {
            let mut out = Vec::new();
            uint(&mut out, value);
            out
        };
        assert_eq!(of(127), [0x7f]);
        assert_eq!(of(128), [0xcc, 0x80]);
        assert_eq!(of(256), [0xcd, 1, 0]);
        assert_eq!(of(1 << 16), [0xce, 0, 1, 0, 0]);
        assert_eq!(of(u64::MAX), [0xcf, 255, 255, 255, 255, 255, 255, 255, 255]);
        let mut out = Vec::new();
        text(&mut out, "ab");
        array(&mut out, 16);
        assert_eq!(out, [0xa2, b'a', b'b', 0xdc, 0, 16]);
        out.clear();
        text(&mut out, &"x".repeat(300));
        assert_eq!(out[..3], [0xda, 1, 44]);
    }

    #[test]
    fn each_rank_has_its_own_messages_and_host_pages_are_told_to_all() {
        let removed = |tier| KvEvent::Removed {
            tier,
            hashes: vec![1],
        };
        let mut batcher = Batcher::new(0.5, 2);
        for _ in 0..EVENTS_MAX + 1 {
            batcher.add(&removed(EventTier::Device(ReplicaId(1))), |_| None);
        }
        batcher.add(&removed(EventTier::Host), |_| None);
        let (messages, events) = batcher.finish();
        assert_eq!(events, u64::from(EVENTS_MAX) + 3);
        let ranks: Vec<_> = messages.iter().map(|message| message.last()).collect();
        assert_eq!(ranks, [Some(&1), Some(&0), Some(&1)]);
        // [seconds, [...], rank]: 0.5 as a double, then the number of events.
        assert_eq!(messages[0][..2], [0x93, 0xcb]);
        assert_eq!(messages[0][2..10], 0.5_f64.to_be_bytes());
        assert_eq!(messages[0][10..13], [0xdc, 0, 64]);
        assert_eq!(messages[2][10], 0x92);
    }
}
