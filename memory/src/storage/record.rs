//! A stored page as bytes: what it is, and its KV.
//!
//! ```text
//! magic, version | lengths | layout | numerics | namespace | address | parent | tokens
//!   | checksum of the KV | checksum of all before | KV
//! ```
//! All but the KV is known to whoever looks for a page, so reading it is comparing bytes. A record
//! that is whole and says something else is foreign; one that contradicts itself is corrupt.

use crate::{KvLayout, LayoutOrder, PageAddress, StorePage};

const MAGIC: &[u8; 8] = b"RSKVPG\x00\x01";
const SUM: usize = 16;

/// Why a stored page is not used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refused {
    /// Shorter or longer than a page is.
    Length,
    /// A checksum does not hold.
    Corrupt,
    /// A whole page of other tokens, namespace, layout or numerics.
    Foreign,
}

/// What all pages of one store have in common.
#[derive(Clone, Debug)]
pub(super) struct Kind {
    layout: String,
    numerics: String,
    page_bytes: usize,
}

impl Kind {
    pub(super) fn new(layout: &KvLayout, numerics: &str) -> Self {
        let order = match layout.order() {
            LayoutOrder::PageFirst => "page-first",
            LayoutOrder::LayerFirst => "layer-first",
        };
        let (tokens, layers) = (layout.page_tokens(), layout.layers());
        let (heads, dim) = (layout.kv_heads(), layout.head_dim());
        let dtype = layout.dtype();
        Self {
            layout: format!("{order}/{tokens}/{layers}/{heads}/{dim}/{dtype:?}"),
            numerics: numerics.to_owned(),
            page_bytes: layout.page_bytes(),
        }
    }

    pub(super) const fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// What the record of a page begins with.
    fn head(&self, namespace: PageAddress, page: &StorePage) -> Vec<u8> {
        let mut head = MAGIC.to_vec();
        let (layout, numerics) = (self.layout.as_bytes(), self.numerics.as_bytes());
        let lengths = [
            layout.len(),
            numerics.len(),
            page.tokens.len(),
            self.page_bytes,
        ];
        for length in lengths {
            head.extend((length as u64).to_le_bytes());
        }
        head.extend(layout);
        head.extend(numerics);
        for address in [namespace, page.address, page.parent] {
            head.extend(address.0);
        }
        page.tokens
            .iter()
            .for_each(|token| head.extend(token.to_le_bytes()));
        head
    }

    /// The record of a page with these bytes.
    pub(super) fn encode(&self, namespace: PageAddress, page: &StorePage, kv: &[u8]) -> Vec<u8> {
        let mut record = self.head(namespace, page);
        record.extend(PageAddress::digest(kv).0);
        let sum = PageAddress::digest(&record);
        record.extend(sum.0);
        record.extend(kv);
        record
    }

    /// The KV of a record, if it is that of this page.
    pub(super) fn decode<'a>(
        &self,
        namespace: PageAddress,
        page: &StorePage,
        record: &'a [u8],
    ) -> Result<&'a [u8], Refused> {
        let head = self.head(namespace, page);
        let sums = head.len();
        let known = record.get(..sums) == Some(&head);
        if !known {
            return Err(if is_whole(record) {
                Refused::Foreign
            } else {
                Refused::Corrupt
            });
        }
        if record.len() != sums + 2 * SUM + self.page_bytes {
            return Err(Refused::Length);
        }
        let (kv_sum, head_sum) = (sums..sums + SUM, sums + SUM..sums + 2 * SUM);
        let kv = &record[head_sum.end..];
        let holds = record[head_sum.clone()] == PageAddress::digest(&record[..head_sum.start]).0
            && record[kv_sum] == PageAddress::digest(kv).0;
        if holds { Ok(kv) } else { Err(Refused::Corrupt) }
    }
}

/// Whether a record is a page of some kind, with checksums that hold.
fn is_whole(record: &[u8]) -> bool {
    let length = |at: usize| {
        let bytes = record.get(MAGIC.len() + 8 * at..)?.get(..8)?;
        usize::try_from(u64::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    let parts = || {
        let (layout, numerics) = (length(0)?, length(1)?);
        let (tokens, kv) = (length(2)?.checked_mul(4)?, length(3)?);
        let fixed = MAGIC.len() + 4 * 8 + 3 * SUM;
        let head = [layout, numerics, tokens]
            .into_iter()
            .try_fold(fixed, usize::checked_add)?;
        let total = head.checked_add(2 * SUM)?.checked_add(kv)?;
        (record.len() == total && record.starts_with(MAGIC)).then_some(head)
    };
    let Some(head) = parts() else { return false };
    let (sums, kv) = (&record[head..head + 2 * SUM], &record[head + 2 * SUM..]);
    sums[..SUM] == PageAddress::digest(kv).0
        && sums[SUM..] == PageAddress::digest(&record[..head + SUM]).0
}
