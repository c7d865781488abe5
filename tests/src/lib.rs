//! Model-based tests, simulator, end-to-end tests.
