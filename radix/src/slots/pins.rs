//! What programs say: pins that hold a path for a time within a budget, and the end of a program,
//! which makes what it alone used go first.

use super::{Handle, SlotError, SlotTree};
use crate::ProgramId;
use rootstock_memory::Nanos;
use std::collections::BTreeMap;

/// Ends of paths that are remembered of one program, the last ones.
const ENDS_MAX: usize = 64;

/// Programs that are remembered.
const PROGRAMS_MAX: usize = 4096;

/// Whose a node is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Owner {
    /// Nobody said.
    #[default]
    Unknown,
    /// One program alone has inserted it.
    One(ProgramId),
    /// Several have.
    Many,
}

impl Owner {
    pub(super) fn joined(self, by: Option<ProgramId>) -> Self {
        match (self, by) {
            (Self::One(owner), Some(by)) if owner == by => self,
            _ => Self::Many,
        }
    }
}

/// A path that is held until its time.
#[derive(Debug)]
pub(super) struct Pin {
    node: Handle,
    program: Option<ProgramId>,
}

/// The last paths of programs, oldest program first out.
#[derive(Debug, Default)]
pub(super) struct Programs {
    ends: BTreeMap<ProgramId, (u64, Vec<Handle>)>,
    seen: BTreeMap<u64, ProgramId>,
    serial: u64,
}

impl Programs {
    fn note(&mut self, program: ProgramId, end: Handle) {
        self.serial += 1;
        let entry = self.ends.entry(program).or_default();
        self.seen.remove(&entry.0);
        entry.0 = self.serial;
        self.seen.insert(self.serial, program);
        if entry.1.last() != Some(&end) {
            entry.1.push(end);
        }
        if entry.1.len() > ENDS_MAX {
            entry.1.remove(0);
        }
        if self.ends.len() > PROGRAMS_MAX
            && let Some((_, oldest)) = self.seen.pop_first()
        {
            self.ends.remove(&oldest);
        }
    }

    fn take(&mut self, program: ProgramId) -> Vec<Handle> {
        let (serial, ends) = self.ends.remove(&program).unwrap_or_default();
        self.seen.remove(&serial);
        ends
    }
}

impl SlotTree {
    /// A program has inserted a path.
    pub(super) fn note_program(&mut self, program: Option<ProgramId>, at: u32) {
        if let Some(program) = program
            && !self.is_root_at(at)
        {
            let end = self.handle(at);
            self.programs.note(program, end);
        }
    }

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
        self.lease(node)?;
        let mut held = 0;
        let mut above = at;
        while !self.is_root_at(above) {
            self.cell_mut(above).pins += 1;
            held += self.len_of(above) as u64;
            above = self.parent(above);
        }
        self.serial += 1;
        self.pins
            .insert((until, self.serial), Pin { node, program });
        Ok(held)
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a pool"
    )]
    fn pin_budget(&self) -> u64 {
        (self.config.pin_base as f64 * self.config.pin_budget.clamp(0.0, 1.0)) as u64
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
            }
            at = self.parent(at);
        }
        // The node has the lease of the pin, so it is there and leased.
        let released = self.release(pin.node);
        assert_eq!(released, Ok(()), "a pin has its lease");
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

    /// A program is over: its pins end, and what it alone has used goes first. Returns the tokens
    /// of that.
    pub fn release_program(&mut self, program: ProgramId) -> u64 {
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
        let mut tokens = 0;
        for end in self.programs.take(program) {
            let Ok(mut at) = self.find(end) else { continue };
            while !self.is_root_at(at) {
                let cell = self.cell_mut(at);
                if cell.owner == Owner::One(program) && !cell.spent {
                    cell.spent = true;
                    tokens += self.len_of(at) as u64;
                    self.refresh(at);
                }
                at = self.parent(at);
            }
        }
        tokens
    }
}
