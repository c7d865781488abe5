//! What the requests under way weigh on each replica: prompt tokens to compute, distinct blocks,
//! seats.

use std::collections::BTreeMap;

use rootstock_memory::Nanos;

use super::config::RouterConfig;

/// Load of one replica.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    pub(super) requests: u32,
    pub(super) prefill_tokens: f64,
    pub(super) decode_blocks: f64,
}

/// A request under way, for its load.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) replica: usize,
    /// Uncached prompt tokens, until the prefill is done.
    pub(super) prefill_tokens: u32,
    /// Hashes of the prompt's blocks; or, without hashes, how many there are.
    pub(super) blocks: Vec<u64>,
    pub(super) nameless_blocks: u32,
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) osl: Option<u32>,
    pub(super) session: Option<String>,
    /// The last news of it.
    pub(super) heard_at: Nanos,
}

/// All requests under way.
#[derive(Debug)]
pub(super) struct UnderWay {
    placed: BTreeMap<u64, Placed>,
    /// Requests that hold each block, one map a replica.
    held: Vec<BTreeMap<u64, u32>>,
}

impl UnderWay {
    pub(super) fn new(replicas: usize) -> Self {
        Self {
            placed: BTreeMap::new(),
            held: vec![BTreeMap::new(); replicas],
        }
    }

    pub(super) fn insert(&mut self, id: u64, placed: Placed) {
        let held = &mut self.held[placed.replica];
        for &block in &placed.blocks {
            *held.entry(block).or_default() += 1;
        }
        self.placed.insert(id, placed);
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Placed> {
        self.placed.get_mut(&id)
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Placed> {
        let placed = self.placed.remove(&id)?;
        let held = &mut self.held[placed.replica];
        for block in &placed.blocks {
            match held.get_mut(block) {
                Some(owners) if *owners > 1 => *owners -= 1,
                Some(_) | None => drop(held.remove(block)),
            }
        }
        Some(placed)
    }

    /// Requests of which nothing was heard since `before`.
    pub(super) fn silent(&self, before: Nanos) -> Vec<u64> {
        let silent = self.placed.iter().filter(|(_, p)| p.heard_at < before);
        silent.map(|(&id, _)| id).collect()
    }

    pub(super) fn count(&self, replica: usize) -> usize {
        let here = |placed: &&Placed| placed.replica == replica;
        self.placed.values().filter(here).count()
    }

    /// Of `blocks`, how many the requests of a replica hold.
    pub(super) fn shared(&self, replica: usize, blocks: &[u64]) -> u32 {
        let held = &self.held[replica];
        let shared = blocks.iter().filter(|block| held.contains_key(block));
        u32::try_from(shared.count()).unwrap_or(u32::MAX)
    }

    pub(super) fn loads(&self, cfg: &RouterConfig) -> Vec<Load> {
        let mut loads = vec![Load::default(); self.held.len()];
        for (load, held) in loads.iter_mut().zip(&self.held) {
            load.decode_blocks = u32::try_from(held.len()).map_or(f64::INFINITY, f64::from);
        }
        for placed in self.placed.values() {
            let load = &mut loads[placed.replica];
            load.requests += 1;
            load.prefill_tokens += f64::from(placed.prefill_tokens);
            load.decode_blocks += self.blocks_beside_held(placed, cfg);
        }
        for load in &mut loads {
            load.decode_blocks = load.decode_blocks.round();
            if !cfg.track_active_blocks {
                load.decode_blocks = 0.0;
            }
            if !cfg.track_prefill_tokens {
                load.prefill_tokens = 0.0;
            }
        }
        loads
    }

    /// Blocks of a request that the map of held ones does not count: those without a hash and
    /// its output; less what fades of its own.
    fn blocks_beside_held(&self, placed: &Placed, cfg: &RouterConfig) -> f64 {
        let nameless = f64::from(placed.nameless_blocks);
        if !cfg.track_output_blocks {
            return nameless;
        }
        let block = cfg.block_tokens;
        let all = (placed.prompt_tokens + placed.output_tokens).div_ceil(block);
        let output = f64::from(all - placed.prompt_tokens / block);
        let Some(osl) = placed.osl else {
            return nameless + output;
        };
        let done = f64::from(placed.output_tokens) / f64::from(osl.max(1));
        let fade = if osl == 0 { 0.0 } else { (1.0 - done).max(0.0) };
        let held = &self.held[placed.replica];
        let own = |block: &&u64| held.get(block) == Some(&1);
        let alone = u32::try_from(placed.blocks.iter().filter(own).count());
        (nameless + output) * fade - alone.map_or(0.0, f64::from) * (1.0 - fade)
    }
}
