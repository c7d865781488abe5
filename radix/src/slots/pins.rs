//! Pins: a path is held for a time, within a budget.
//!
//! Without a host tier a pin is a lease: the path stays on the device, and admission waits. With
//! one it holds the path on any tier: what is pinned leaves the device after all else, by way of a
//! copy, and the copy stays until the pin is over. So a pin refuses nobody. Only where not even
//! the host tier has room is a part of it lost, from its end ([`SlotTree::lost`]).

use super::{Handle, SlotError, SlotTree};
use crate::ProgramId;
use rootstock_memory::Nanos;

/// A path that is held until its time.
#[derive(Debug)]
pub(super) struct Pin {
    pub(super) node: Handle,
    program: Option<ProgramId>,
    /// It holds the path on the device.
    pub(super) is_lease: bool,
}

impl SlotTree {
    /// Holds the path of a node until `until`: as much of it, from the top, as the budget allows.
    /// Returns the tokens that are held.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn pin(
        &mut self,
        handle: Handle,
        program: Option<ProgramId>,
        until: Nanos,
    ) -> Result<u64, SlotError> {
        let mut at = self.find(handle)?;
        let budget = self.pin_budget();
        while !self.is_root_at(at) && self.pinned_tokens + self.unpinned(at) > budget {
            at = self.parent(at);
        }
        if self.is_root_at(at) {
            return Ok(0);
        }
        self.pinned_tokens += self.unpinned(at);
        let node = self.handle(at);
        let is_lease = !self.host.enabled;
        if is_lease {
            self.lease(node)?;
        }
        let mut held = 0;
        let mut above = at;
        while !self.is_root_at(above) {
            self.cell_mut(above).pins += 1;
            self.refresh(above);
            held += self.len_of(above) as u64;
            above = self.parent(above);
        }
        self.serial += 1;
        let pin = Pin {
            node,
            program,
            is_lease,
        };
        self.pins.insert((until, self.serial), pin);
        Ok(held)
    }

    /// What of a pinned path to copy to the host tier now, from the top, so that it can leave the
    /// device at any time. Nothing where copies are made late.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn copies_for_pin(&self, handle: Handle) -> Result<Vec<Handle>, SlotError> {
        let mut at = self.find(handle)?;
        while !self.is_root_at(at) && self.cell(at).pins == 0 {
            at = self.parent(at);
        }
        if !self.host.enabled || self.host.write_back || self.is_root_at(at) {
            return Ok(Vec::new());
        }
        let is_open = self.cell(at).device.is_some() && self.cell(at).host.is_none();
        Ok(if is_open {
            self.chain_to_back_up(at)
        } else {
            Vec::new()
        })
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a pool"
    )]
    fn pin_budget(&self) -> u64 {
        let base = if self.host.enabled && self.host.tokens > 0 {
            self.host.tokens
        } else {
            self.config.device_tokens
        };
        (base as f64 * self.config.pin_budget.clamp(0.0, 1.0)) as u64
    }

    /// Tokens of a path that no pin holds yet.
    fn unpinned(&self, mut at: u32) -> u64 {
        let mut tokens = 0;
        while !self.is_root_at(at) && self.cell(at).pins == 0 {
            tokens += self.len_of(at) as u64;
            at = self.parent(at);
        }
        tokens
    }

    fn unpin(&mut self, pin: &Pin) {
        let Ok(mut at) = self.find(pin.node) else {
            return;
        };
        while !self.is_root_at(at) {
            let tokens = self.len_of(at) as u64;
            let cell = self.cell_mut(at);
            cell.pins -= 1;
            if cell.pins == 0 {
                self.pinned_tokens -= tokens;
                self.refresh(at);
            }
            at = self.parent(at);
        }
        if pin.is_lease {
            // The node has the lease of the pin, so it is there and leased.
            let released = self.release(pin.node);
            assert_eq!(released, Ok(()), "a pin has its lease");
        }
    }

    /// A pinned leaf is about to go, because no tier has room for it: its pins end one node
    /// higher.
    pub(super) fn shorten_pins(&mut self, at: u32) {
        if self.cell(at).pins == 0 {
            return;
        }
        let tokens = self.len_of(at) as u64;
        self.pinned_tokens -= tokens;
        self.lost_tokens += tokens;
        let (gone, parent) = (self.handle(at), self.parent(at));
        let shorter = (!self.is_root_at(parent)).then(|| self.handle(parent));
        self.pins.retain(|_, pin| {
            if pin.node == gone {
                shorter.map(|node| pin.node = node).is_some()
            } else {
                true
            }
        });
    }

    /// Ends the pins whose time is over; returns how many those are.
    pub fn expire_pins(&mut self, now: Nanos) -> usize {
        let mut ended = 0;
        while let Some((&key, _)) = self.pins.first_key_value()
            && key.0 <= now
            && let Some(pin) = self.pins.remove(&key)
        {
            self.unpin(&pin);
            ended += 1;
        }
        ended
    }

    pub(super) fn unpin_program(&mut self, program: ProgramId) {
        let of_it = self
            .pins
            .iter()
            .filter(|(_, pin)| pin.program == Some(program));
        let keys: Vec<_> = of_it.map(|(&key, _)| key).collect();
        for key in keys {
            if let Some(pin) = self.pins.remove(&key) {
                self.unpin(&pin);
            }
        }
    }

    /// When the next pin ends.
    #[must_use]
    pub fn next_pin_end(&self) -> Option<Nanos> {
        self.pins.first_key_value().map(|(&(until, _), _)| until)
    }

    /// Tokens that pins hold.
    #[must_use]
    pub const fn pinned(&self) -> u64 {
        self.pinned_tokens
    }

    /// Counter: pinned tokens that were lost, because no tier had room for them.
    #[must_use]
    pub const fn lost(&self) -> u64 {
        self.lost_tokens
    }
}
