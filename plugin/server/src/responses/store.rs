//! Responses kept for `previous_response_id` and for being read again, within a number of bytes:
//! the oldest goes first. Each belongs to the salt under which it was made, and nobody else finds
//! it.

use std::collections::{BTreeMap, VecDeque};

use serde_json::Value;

/// What is kept of a response.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// The response as it was answered.
    pub response: Value,
    /// The conversation up to and with it, without instructions.
    pub messages: Vec<Value>,
    /// The salt of its request.
    pub salt: Option<String>,
}

/// The responses.
#[derive(Debug)]
pub struct Store {
    kept: BTreeMap<String, (usize, Kept)>,
    /// Ids, the oldest first; those that were removed may still stand here.
    order: VecDeque<String>,
    bytes: usize,
    bytes_max: usize,
}

impl Store {
    /// A store of at most so many bytes of JSON.
    pub fn new(bytes_max: usize) -> Store {
        Store {
            kept: BTreeMap::new(),
            order: VecDeque::new(),
            bytes: 0,
            bytes_max,
        }
    }

    /// Keeps a response; one that is larger than the whole store is not kept.
    pub fn insert(&mut self, id: String, kept: Kept) {
        let messages: usize = kept
            .messages
            .iter()
            .map(|message| message.to_string().len())
            .sum();
        let bytes = messages + kept.response.to_string().len() + id.len();
        if bytes > self.bytes_max {
            return;
        }
        self.remove(&id, kept.salt.as_deref());
        self.bytes += bytes;
        self.order.push_back(id.clone());
        self.kept.insert(id, (bytes, kept));
        while self.bytes > self.bytes_max {
            let Some(oldest) = self.order.pop_front() else {
                return;
            };
            if let Some((bytes, _)) = self.kept.remove(&oldest) {
                self.bytes -= bytes;
            }
        }
    }

    /// A response made under this salt.
    pub fn get(&self, id: &str, salt: Option<&str>) -> Option<&Kept> {
        let (_, kept) = self.kept.get(id)?;
        (kept.salt.as_deref() == salt).then_some(kept)
    }

    /// Forgets a response; false when there is none.
    pub fn remove(&mut self, id: &str, salt: Option<&str>) -> bool {
        if self.get(id, salt).is_none() {
            return false;
        }
        if let Some((bytes, _)) = self.kept.remove(id) {
            self.bytes -= bytes;
        }
        self.order.retain(|kept| kept != id);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn kept(salt: Option<&str>) -> Kept {
        Kept {
            response: json!({}),
            messages: vec![json!({"content": "0123456789"})],
            salt: salt.map(str::to_owned),
        }
    }

    #[test]
    fn the_oldest_goes_when_there_is_no_room() {
        let mut store = Store::new(70);
        for id in ["a", "b", "c"] {
            store.insert(id.into(), kept(None));
        }
        assert!(store.get("a", None).is_none());
        assert!(store.get("b", None).is_some() && store.get("c", None).is_some());
        assert!(store.bytes <= 70);
        assert!(store.remove("b", None) && !store.remove("b", None));
        Store::new(10).insert("a".into(), kept(None));
    }

    #[test]
    fn nobody_finds_what_another_salt_made() {
        let mut store = Store::new(1000);
        store.insert("a".into(), kept(Some("x")));
        assert!(store.get("a", Some("x")).is_some());
        assert!(store.get("a", None).is_none() && store.get("a", Some("y")).is_none());
        assert!(!store.remove("a", None));
    }
}
