//! Configurations as JSON, with every name checked.

use rootstock::CoreConfig;
use rootstock::radix::CacheConfig;
use serde_json::Value;

use crate::status::Failure;

/// A cache configuration; what is absent has its default.
pub(crate) fn cache(text: &str) -> Result<CacheConfig, Failure> {
    let defaults = serde_json::to_value(CacheConfig::default());
    read(text, "the cache configuration", defaults.ok())
}

/// A core configuration: `cache`, `scheduler`, `limits`, `router`; what is absent has its default.
///
/// `page_tokens` of the scheduler follows that of the cache unless it is given.
pub(crate) fn core(text: &str) -> Result<CoreConfig, Failure> {
    let mut defaults = serde_json::to_value(CoreConfig {
        cache: CacheConfig::default(),
        scheduler: rootstock::scheduler::SchedulerConfig::default(),
        limits: rootstock::Limits::default(),
        router: rootstock::RouterConfig::default(),
    })
    .ok();
    let given: Value = parse(text, "the core configuration")?;
    if let Some(page_tokens) = given.pointer("/cache/page_tokens")
        && let Some(slot) = defaults
            .as_mut()
            .and_then(|all| all.pointer_mut("/scheduler/page_tokens"))
    {
        *slot = page_tokens.clone();
    }
    read(text, "the core configuration", defaults)
}

fn parse(text: &str, what: &str) -> Result<Value, Failure> {
    let text = if text.is_empty() { "{}" } else { text };
    serde_json::from_str(text).map_err(|error| Failure::invalid(format!("{what}: {error}")))
}

/// Lays `text` over the defaults and reads the whole.
fn read<T: serde::de::DeserializeOwned>(
    text: &str,
    what: &str,
    defaults: Option<Value>,
) -> Result<T, Failure> {
    let mut all = defaults.unwrap_or_default();
    let given = parse(text, what)?;
    lay_over(&mut all, given, "")
        .map_err(|name| Failure::invalid(format!("{what} has no field {name}")))?;
    serde_json::from_value(all).map_err(|error| Failure::invalid(format!("{what}: {error}")))
}

/// Replaces what is given, field by field. An error is the name of a field that does not exist.
fn lay_over(all: &mut Value, given: Value, path: &str) -> Result<(), String> {
    match (all, given) {
        (Value::Object(all), Value::Object(given)) => {
            for (name, value) in given {
                let path = format!("{path}{name}");
                match all.get_mut(&name) {
                    Some(slot) => lay_over(slot, value, &format!("{path}."))?,
                    None => return Err(path),
                }
            }
        }
        (all, given) => *all = given,
    }
    Ok(())
}
