//! Programs: where the prefixes of each end, so that something can be said of all of them.

use super::{Handle, SlotTree};
use crate::ProgramId;
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

#[derive(Debug, Default)]
struct Program {
    serial: u64,
    /// None within another, the newest last.
    ends: Vec<Handle>,
    /// Where its last request that is done ended.
    done: Option<Handle>,
}

/// The last paths of programs, oldest program first out.
#[derive(Debug, Default)]
pub(super) struct Programs {
    known: BTreeMap<ProgramId, Program>,
    seen: BTreeMap<u64, ProgramId>,
    serial: u64,
}

impl Programs {
    fn note(&mut self, id: ProgramId, ends: Vec<Handle>) {
        self.serial += 1;
        let program = self.known.entry(id).or_default();
        self.seen.remove(&program.serial);
        program.serial = self.serial;
        self.seen.insert(self.serial, id);
        program.ends = ends;
        if self.known.len() > PROGRAMS_MAX
            && let Some((_, oldest)) = self.seen.pop_first()
        {
            self.known.remove(&oldest);
        }
    }

    fn ends(&self, id: ProgramId) -> &[Handle] {
        self.known.get(&id).map_or(&[], |program| &program.ends)
    }

    /// A node is gone, of which the prefix of a program is left up to `shorter`.
    fn shorten(&mut self, id: ProgramId, gone: Handle, shorter: Option<Handle>) {
        let Some(program) = self.known.get_mut(&id) else {
            return;
        };
        if program.done == Some(gone) {
            program.done = shorter;
        }
        let Some(at) = program.ends.iter().position(|&end| end == gone) else {
            return;
        };
        match shorter.filter(|shorter| !program.ends.contains(shorter)) {
            Some(shorter) => program.ends[at] = shorter,
            None => drop(program.ends.remove(at)),
        }
    }

    pub(super) fn take(&mut self, id: ProgramId) -> Vec<Handle> {
        let program = self.known.remove(&id).unwrap_or_default();
        self.seen.remove(&program.serial);
        program.ends
    }
}

impl SlotTree {
    /// A program has inserted a path.
    pub(super) fn note_program(&mut self, program: Option<ProgramId>, at: u32) {
        let Some(program) = program.filter(|_| !self.is_root_at(at)) else {
            return;
        };
        let mut ends = self.programs.ends(program).to_vec();
        let is_part = |last: &Handle| self.find(*last).is_ok_and(|last| self.is_above(at, last));
        if ends.last().is_some_and(is_part) {
            return;
        }
        ends.retain(|&end| self.find(end).is_ok_and(|end| !self.is_above(end, at)));
        ends.push(self.handle(at));
        ends.drain(..ends.len().saturating_sub(ENDS_MAX));
        self.programs.note(program, ends);
    }

    /// A request of a program is done; returns where the one before it ended.
    pub(super) fn done_program(&mut self, program: ProgramId, at: u32) -> Option<Handle> {
        let here = self.handle(at);
        self.programs.known.get_mut(&program)?.done.replace(here)
    }

    /// A leaf is about to go: the prefix of the program that it is of ends one node higher.
    pub(super) fn shorten_ends(&mut self, at: u32) {
        if let Owner::One(program) = self.cell(at).owner {
            let (gone, parent) = (self.handle(at), self.parent(at));
            let shorter = (!self.is_root_at(parent)).then(|| self.handle(parent));
            self.programs.shorten(program, gone, shorter);
        }
    }

    /// Whether the path of `below` goes through `above`.
    fn is_above(&self, above: u32, mut below: u32) -> bool {
        let depth = self.tree.node(above).depth;
        while self.tree.node(below).depth > depth {
            below = self.parent(below);
        }
        below == above
    }

    /// Where the prefixes of a program end that are still there, none within another.
    #[must_use]
    pub fn ends_of(&self, program: ProgramId) -> Vec<Handle> {
        let ends = self.programs.ends(program).iter().copied();
        ends.filter(|&end| self.find(end).is_ok()).collect()
    }

    /// A program is over: its pins end, and what it alone has used goes first. Returns the tokens
    /// of that.
    pub fn release_program(&mut self, program: ProgramId) -> u64 {
        self.unpin_program(program);
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
