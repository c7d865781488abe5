//! Model-based tests, simulator, end-to-end tests.
//!
//! This library is the engine double and the simulator that drive scheduler and cache on a
//! virtual clock from one seed. `SIM_SEED=n cargo test -p rootstock-tests --test sim_swarm`
//! replays a run.

pub mod double;
mod judge;
pub mod planted;
pub mod report;
pub mod rig;
pub mod rng;
pub mod sim;
pub mod swarm;
pub mod text;
mod traffic;
pub mod world;
