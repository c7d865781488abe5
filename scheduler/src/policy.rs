//! The order of the queue, as keys that compare.
//!
//! A key is computed from a request's own data and changes at two kinds of moments: an aging
//! tick, and a new look at how much of the prompt is cached. Between them the queue is a sorted
//! set that nobody rescans. Where tenants share, a tenant's share decides between the tier and
//! the rest of the key (`queue.rs`).
//!
//! `Priority`: (class, strict tier desc, effective arrival asc, id), where the effective arrival
//! is the arrival less the jump less the seconds the cache saves, the last capped by the aging
//! bound. `Lpm`: cached tokens desc, then arrival. `Lof`: output asked for desc, then arrival.
//! `DfsWeight`: groups of shared prefixes (`groups.rs`), but the aged before and speculative work
//! after them.
//! `Fcfs`: arrival. Waiting raises the tier by one per aging period, but in `Fcfs`.
//!
//! Aging acts on the order alone: it grants no right to preempt and does not reach the cache.

use std::cmp::Reverse;

use rootstock_memory::Nanos;

use crate::config::{SchedulePolicy, SchedulerConfig};
use crate::request::{Class, RequestId};

const NS_PER_S: f64 = 1e9;
/// Cap on the worth of a cached prefix while aging is off.
const BENEFIT_CAP_NS: u64 = 30_000_000_000;

/// Place in the queue; the least key is first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct QueueKey {
    class: Reverse<Class>,
    tier: Reverse<u64>,
    rank: i128,
    arrival: Nanos,
    /// Whose key.
    pub(crate) id: RequestId,
}

/// What a key is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyParts {
    pub(crate) id: RequestId,
    pub(crate) class: Class,
    pub(crate) strict: u32,
    pub(crate) jump_ns: u64,
    pub(crate) arrival: Nanos,
    /// Whole aging periods waited.
    pub(crate) aged: u64,
    /// Tokens of the request found in the cache at the last look.
    pub(crate) cached_tokens: u32,
    /// Output tokens asked for.
    pub(crate) output_max: u32,
}

/// Policy and its constants, from the configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    policy: SchedulePolicy,
    /// 0 is off.
    pub(crate) aging_ns: u64,
    /// Replaced by what is learned from steps.
    pub(crate) prefill_ns_per_token: u64,
}

impl QueueKey {
    /// Whether the request is a client's and has not aged: grouping may reorder it.
    pub(crate) fn is_plain(&self) -> bool {
        self.class.0 == Class::Client && self.tier.0 == 0
    }

    /// What goes before shares: class and tier.
    pub(crate) fn urgency(&self) -> (Reverse<Class>, Reverse<u64>) {
        (self.class, self.tier)
    }
}

impl Order {
    pub(crate) fn new(cfg: &SchedulerConfig) -> Self {
        let aging_ns = match cfg.policy {
            SchedulePolicy::Fcfs => 0,
            SchedulePolicy::Lpm
            | SchedulePolicy::DfsWeight
            | SchedulePolicy::Lof
            | SchedulePolicy::Priority => seconds_to_ns(cfg.aging_s),
        };
        Self {
            policy: cfg.policy,
            aging_ns,
            prefill_ns_per_token: u64::from(cfg.prefill_ns_per_token),
        }
    }

    /// Whether a look at the cache can change a key.
    pub(crate) fn uses_cache(&self) -> bool {
        match self.policy {
            SchedulePolicy::Fcfs | SchedulePolicy::DfsWeight | SchedulePolicy::Lof => false,
            SchedulePolicy::Lpm | SchedulePolicy::Priority => true,
        }
    }

    /// Whole aging periods in a wait.
    pub(crate) fn aged(&self, waited_ns: u64) -> u64 {
        waited_ns.checked_div(self.aging_ns).unwrap_or(0)
    }

    /// Whether those who wait are grouped by shared prefixes.
    pub(crate) fn is_grouped(&self) -> bool {
        self.policy == SchedulePolicy::DfsWeight
    }

    /// Whether tenants share evenly.
    pub(crate) fn is_fair(cfg: &SchedulerConfig) -> bool {
        let by_key = !matches!(cfg.policy, SchedulePolicy::Fcfs | SchedulePolicy::DfsWeight);
        cfg.fair_shares && by_key
    }

    pub(crate) fn key(&self, p: &KeyParts) -> QueueKey {
        let arrival = i128::from(p.arrival);
        let (tier, rank) = match self.policy {
            SchedulePolicy::Fcfs => (0, arrival),
            SchedulePolicy::DfsWeight => (p.aged, arrival),
            SchedulePolicy::Lpm => (p.aged, -i128::from(p.cached_tokens)),
            SchedulePolicy::Lof => (p.aged, -i128::from(p.output_max)),
            SchedulePolicy::Priority => {
                let early = i128::from(p.jump_ns) + i128::from(self.benefit_ns(p.cached_tokens));
                (u64::from(p.strict).saturating_add(p.aged), arrival - early)
            }
        };
        let class = Reverse(p.class);
        QueueKey {
            class,
            tier: Reverse(tier),
            rank,
            arrival: p.arrival,
            id: p.id,
        }
    }

    fn benefit_ns(&self, cached_tokens: u32) -> u64 {
        let cap = if self.aging_ns > 0 {
            self.aging_ns
        } else {
            BENEFIT_CAP_NS
        };
        u64::from(cached_tokens)
            .saturating_mul(self.prefill_ns_per_token)
            .min(cap)
    }
}

/// Seconds to nanoseconds; what is not a positive number is 0, what is too large is capped.
pub(crate) fn seconds_to_ns(s: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "float to integer casts saturate and turn NaN into 0, which is what is wanted"
    )]
    let ns = (s * NS_PER_S) as u64;
    ns
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(id: u64) -> KeyParts {
        KeyParts {
            id: RequestId(id),
            class: Class::Client,
            strict: 0,
            jump_ns: 0,
            arrival: 1_000_000_000_000,
            aged: 0,
            cached_tokens: 0,
            output_max: 1,
        }
    }

    fn order(policy: SchedulePolicy) -> Order {
        Order::new(&SchedulerConfig {
            policy,
            ..SchedulerConfig::default()
        })
    }

    #[test]
    fn extreme_hints_order_without_overflow() {
        let o = order(SchedulePolicy::Priority);
        let mut keys = Vec::new();
        for jump_s in [
            f64::NAN,
            f64::NEG_INFINITY,
            -5.0,
            0.0,
            1.5,
            2_147_483_647.0,
            f64::INFINITY,
        ] {
            for strict in [0, u32::MAX] {
                let jump_ns = seconds_to_ns(jump_s);
                keys.push(o.key(&KeyParts {
                    strict,
                    jump_ns,
                    aged: u64::MAX,
                    ..parts(1)
                }));
            }
        }
        keys.sort();
        assert_eq!(keys.len(), 14);
        assert_eq!(seconds_to_ns(f64::NAN), 0);
        assert_eq!(seconds_to_ns(-1.0), 0);
        assert_eq!(seconds_to_ns(f64::INFINITY), u64::MAX);
    }

    #[test]
    fn the_worth_of_a_cached_prefix_is_capped_by_the_aging_bound() {
        let o = order(SchedulePolicy::Priority);
        let hot = o.key(&KeyParts {
            cached_tokens: u32::MAX,
            ..parts(2)
        });
        let bound = KeyParts {
            arrival: parts(1).arrival - 30_000_000_001,
            ..parts(1)
        };
        assert!(
            o.key(&bound) < hot,
            "older by more than the bound goes first"
        );
        let inside = KeyParts {
            arrival: parts(1).arrival - 29_999_999_999,
            ..parts(1)
        };
        assert!(hot < o.key(&inside));
    }

    #[test]
    fn speculative_work_is_behind_every_client_however_long_it_waited() {
        let o = order(SchedulePolicy::Priority);
        let warm = KeyParts {
            class: Class::Speculative,
            strict: u32::MAX,
            aged: 1000,
            ..parts(1)
        };
        assert!(o.key(&parts(2)) < o.key(&warm));
    }
}
