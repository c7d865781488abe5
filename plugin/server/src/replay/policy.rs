//! The policies that the cache knows, by name.
//!
//! Names and number come from the derived `Deserialize` of [`PolicyKind`], the same that reads
//! configuration files: a policy added to the cache is replayed without a word here.

use std::fmt;
use std::str::FromStr;

use rootstock::radix::PolicyKind;
use serde::de::value::Error as NoValue;
use serde::de::{Deserialize, Deserializer, Error as _, IntoDeserializer, Visitor};

/// A policy and its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// What the cache is configured with.
    pub kind: PolicyKind,
    /// As configuration files spell it.
    pub name: &'static str,
}

impl Policy {
    /// All policies, in the order in which the cache declares them.
    pub fn all() -> Vec<Self> {
        let mut variants = Variants(&[]);
        // Always an error: `Variants` holds no value, it only looks at what is asked for.
        drop(PolicyKind::deserialize(&mut variants));
        let policy = |&name: &&'static str| {
            let named: Result<PolicyKind, NoValue> =
                PolicyKind::deserialize(name.into_deserializer());
            named.ok().map(|kind| Self { kind, name })
        };
        variants.0.iter().filter_map(policy).collect()
    }
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::all().into_iter().find(|policy| policy.name == name);
        found.ok_or(UnknownPolicy)
    }
}

/// A name that is no policy's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPolicy;

impl std::error::Error for UnknownPolicy {}

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = Policy::all().iter().map(|policy| policy.name).collect();
        write!(out, "no such policy; there are {}", names.join(", "))
    }
}

/// Notes the names of an enum's variants when it is asked to be one.
struct Variants(&'static [&'static str]);

impl<'de> Deserializer<'de> for &mut Variants {
    type Error = NoValue;

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, NoValue> {
        self.0 = variants;
        Err(NoValue::custom("names only"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, NoValue> {
        Err(NoValue::custom("not an enum"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policies_are_those_of_the_cache_under_their_names() {
        let all = Policy::all();
        let expected = [(PolicyKind::Lru, "lru"), (PolicyKind::Priority, "priority")];
        for (kind, name) in expected {
            assert!(all.contains(&Policy { kind, name }), "{name}: {all:?}");
        }
        assert_eq!(
            "lru".parse(),
            Ok(Policy {
                kind: PolicyKind::Lru,
                name: "lru"
            })
        );
        for policy in all {
            assert_eq!(serde_json::to_value(policy.kind).unwrap(), policy.name);
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let text = "LRU".parse::<Policy>().unwrap_err().to_string();
        assert!(
            text.starts_with("no such policy; there are lru, priority"),
            "{text}"
        );
    }
}
