//! Policies, and how SGLang names pages: chained SHA-256.

use pyo3::PyResult;
use rootstock::radix::slots::{Digest, SlotPolicy, SpaceName};
use sha2::{Digest as _, Sha256};

use crate::failure::invalid;

/// A page is named by what comes before it and its tokens as 32-bit little endian integers.
pub(super) fn hash_page(before: Option<&Digest>, tokens: &[u32]) -> Digest {
    let mut hash = Sha256::new();
    if let Some(before) = before {
        hash.update(before);
    }
    if cfg!(target_endian = "little") {
        hash.update(bytemuck::cast_slice::<u32, u8>(tokens));
    } else {
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
    }
    hash.finalize().into()
}

/// What the first pages of a namespace chain on: in stores, and in events.
pub(super) fn seeds_of(space: &SpaceName) -> [Option<Digest>; 2] {
    if space.extra.is_none() && space.salt.is_none() {
        return [None, None];
    }
    let mut hash = Sha256::new_with_prefix(b"sglang-cache-namespace-v1");
    for part in [&space.extra, &space.salt] {
        match part {
            None => hash.update([0]),
            Some(text) => {
                hash.update([1]);
                hash.update((text.len() as u64).to_le_bytes());
                hash.update(text.as_bytes());
            }
        }
    }
    let salted = space.salt.as_ref().map(|salt| {
        let hash = Sha256::new_with_prefix(b"sglang-cache-salt-v1\0");
        hash.chain_update(salt.as_bytes()).finalize().into()
    });
    [Some(hash.finalize().into()), salted]
}

pub(super) fn hex(digest: &Digest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn digests_of(names: &[String]) -> PyResult<Vec<Digest>> {
    let digest = |name: &String| {
        let mut digest = Digest::default();
        let is_hex = name.len() == 2 * digest.len() && name.is_ascii();
        for (place, byte) in digest.iter_mut().enumerate() {
            let pair = name.get(2 * place..2 * place + 2).filter(|_| is_hex);
            let value = pair.and_then(|pair| u8::from_str_radix(pair, 16).ok());
            *byte = value.ok_or_else(|| invalid(format!("{name:?} names no page")))?;
        }
        Ok(digest)
    };
    names.iter().map(digest).collect()
}

pub(super) fn policy_of(name: &str, numbers: &[f64]) -> PyResult<SlotPolicy> {
    Ok(match (name, numbers) {
        ("lru", []) => SlotPolicy::Lru,
        ("lfu", []) => SlotPolicy::Lfu,
        ("priority", []) => SlotPolicy::Priority,
        ("fifo", []) => SlotPolicy::Fifo,
        ("filo", []) => SlotPolicy::Filo,
        ("mru", []) => SlotPolicy::Mru,
        ("agent", []) => SlotPolicy::Agent,
        ("slru", &[hits]) => SlotPolicy::Slru { hits },
        ("tlru", &[threshold, estimate]) => SlotPolicy::Tlru {
            threshold,
            estimate,
        },
        _ => {
            return Err(invalid(format!(
                "policy is {name:?} with {} numbers: lru, lfu, priority, fifo, filo, mru and agent \
                 take none, slru one, tlru two",
                numbers.len()
            )));
        }
    })
}
