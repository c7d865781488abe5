// Rootstock: a KV-cache and scheduling core for agents. Made by cbindgen from plugin/capi/src; do not
// edit. A complete host is in plugin/capi/examples/agents.c.
//
// Rules
// - Every call that can fail gives a RootstockStatus; ROOTSTOCK_STATUS_OK is 0.
//   rootstock_last_error tells the
//   rest: the value, the limit, the remedy. It is kept per thread.
// - A handle (RootstockCache, RootstockCore) is used by one thread at a time. A second one that comes
//   meanwhile gets ROOTSTOCK_STATUS_BUSY and changes nothing. Different handles are independent.
// - Leases and allocations are numbers that their handle knows; a wrong or ended one is
//   ROOTSTOCK_STATUS_UNKNOWN, never undefined. They end with their handle.
// - Buffers are the caller's. One that is too small gives ROOTSTOCK_STATUS_TOO_SMALL, says how much is needed,
//   and nothing has changed.
// - Times are nanoseconds of a monotonic clock of the host; they never go back.
// - A panic inside is caught: the call gives ROOTSTOCK_STATUS_PANICKED, and so does every later call on that
//   handle but its free.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Version of the ABI: a host built for the same number works with this library.
#define ROOTSTOCK_ABI_VERSION 1

// Host memory, as a tier of a RootstockCopy.
#define ROOTSTOCK_TIER_HOST 65536

// Storage, as a tier of a RootstockCopy.
#define ROOTSTOCK_TIER_STORAGE 65537

// How a call ended.
typedef enum RootstockStatus {
  // Done.
  ROOTSTOCK_STATUS_OK = 0,
  // An argument cannot be: null, out of range, not UTF-8, not JSON, of another version.
  ROOTSTOCK_STATUS_INVALID = 1,
  // No such lease, allocation, step or replica.
  ROOTSTOCK_STATUS_UNKNOWN = 2,
  // A buffer is too small; the length needed is told, nothing has changed.
  ROOTSTOCK_STATUS_TOO_SMALL = 3,
  // Not enough pages, and nothing was evicted for it.
  ROOTSTOCK_STATUS_SHORT = 4,
  // The queue is full; ask again later.
  ROOTSTOCK_STATUS_FULL = 5,
  // It can never be done.
  ROOTSTOCK_STATUS_REFUSED = 6,
  // Another thread is using the handle.
  ROOTSTOCK_STATUS_BUSY = 7,
  // A panic was caught, in this call or an earlier one: the handle can only be freed.
  ROOTSTOCK_STATUS_PANICKED = 8,
  // A recount does not add up: a fault of Rootstock, or pages that a host gave away twice.
  ROOTSTOCK_STATUS_CORRUPT = 9,
} RootstockStatus;

// How a verb was answered.
typedef enum RootstockOutcomeKind {
  // Done for all pages.
  ROOTSTOCK_OUTCOME_KIND_ACCEPTED = 0,
  // Done for the leading `pages` of `asked_pages`.
  ROOTSTOCK_OUTCOME_KIND_CLIPPED = 1,
  // Under way; it takes effect when copies are done.
  ROOTSTOCK_OUTCOME_KIND_DEFERRED = 2,
  // Nothing of it is cached.
  ROOTSTOCK_OUTCOME_KIND_MISSING = 3,
} RootstockOutcomeKind;

// What an event tells.
typedef enum RootstockEventKind {
  // There is none.
  ROOTSTOCK_EVENT_KIND_NOTHING = 0,
  // The request began; the cached tokens are set.
  ROOTSTOCK_EVENT_KIND_STARTED = 1,
  // It drew tokens.
  ROOTSTOCK_EVENT_KIND_TOKENS = 2,
  // It ended; the last event of each admitted request.
  ROOTSTOCK_EVENT_KIND_FINAL = 3,
} RootstockEventKind;

// Why a request ended.
typedef enum RootstockReason {
  // It has not.
  ROOTSTOCK_REASON_RUNNING = 0,
  // A stop token.
  ROOTSTOCK_REASON_STOP = 1,
  // The host said so.
  ROOTSTOCK_REASON_STOP_STRING = 2,
  // `max_tokens` or the model length.
  ROOTSTOCK_REASON_LENGTH = 3,
  // Aborted by the host.
  ROOTSTOCK_REASON_ABORTED = 4,
  // Its step failed.
  ROOTSTOCK_REASON_STEP_FAILED = 5,
  // The output of its step did not fit the plan.
  ROOTSTOCK_REASON_BAD_OUTPUT = 6,
  // Deadline or queue timeout.
  ROOTSTOCK_REASON_EXPIRED = 7,
  // No pages, and nothing left to take them from.
  ROOTSTOCK_REASON_OUT_OF_PAGES = 8,
  // Gave way as often as is allowed.
  ROOTSTOCK_REASON_TOO_MANY_PREEMPTIONS = 9,
  // Gave its place in the full queue to a better one.
  ROOTSTOCK_REASON_DISPLACED = 10,
} RootstockReason;

// What a verb does.
typedef enum RootstockVerb {
  // Keep the bytes for `seconds`: under pressure they demote, they are not dropped.
  ROOTSTOCK_VERB_PIN = 0,
  // Raise the importance to `priority`, until `seconds` of idleness have passed (0: for good).
  ROOTSTOCK_VERB_RETAIN = 1,
  // Bring lower tiers up to `replica` before a request asks.
  ROOTSTOCK_VERB_PREFETCH = 2,
  // Free the device copy, keep the bytes below.
  ROOTSTOCK_VERB_DEMOTE = 3,
  // Give up a pin and let the pages go first.
  ROOTSTOCK_VERB_RELEASE = 4,
} RootstockVerb;

// What becomes of the KV of a lease that ends.
typedef enum RootstockFate {
  // Stays cached by the ordinary rules.
  ROOTSTOCK_FATE_KEEP = 0,
  // A later prompt has replaced it: it goes first.
  ROOTSTOCK_FATE_SUPERSEDED = 1,
  // Nobody will ask for it again: it goes at once.
  ROOTSTOCK_FATE_EPHEMERAL = 2,
  // The request will be back.
  ROOTSTOCK_FATE_PREEMPTED = 3,
} RootstockFate;

// What a pointer of the host's points to.
typedef struct RootstockCache RootstockCache;

// What a pointer of the host's points to.
typedef struct RootstockCore RootstockCore;

// What a pointer of the host's points to.
typedef struct RootstockPlan RootstockPlan;

// A verb on a prefix.
typedef struct RootstockAction {
  // sizeof(RootstockAction).
  uint32_t struct_size;
  // A RootstockVerb.
  uint32_t verb;
  // Who asks.
  uint32_t tenant;
  // Importance, for retain.
  int32_t priority;
  // Seconds, for pin and retain.
  uint64_t seconds;
  // For prefetch.
  uint32_t replica;
  // Namespace of the prefix.
  uint64_t namespace_id;
  // Its tokens; a last partial page is left out.
  const uint32_t *tokens;
  // How many.
  size_t length;
} RootstockAction;

// The answer to a verb.
typedef struct RootstockOutcome {
  // How.
  enum RootstockOutcomeKind kind;
  // Pages it was done for, or that are on their way.
  uint32_t pages;
  // Pages asked for.
  uint32_t asked_pages;
} RootstockOutcome;

// What else than the tokens says whose KV it is. Texts of a length; null is absent.
typedef struct RootstockNamespace {
  // sizeof(RootstockNamespace).
  uint32_t struct_size;
  // Model and its revision.
  const char *model;
  // Bytes of `model`.
  size_t model_length;
  // What else changes the numbers: kernels, element type, layout.
  const char *numerics;
  // Bytes of `numerics`.
  size_t numerics_length;
  // Adapter, or null.
  const char *lora;
  // Bytes of `lora`.
  size_t lora_length;
  // Salt of the tenant, or null.
  const char *salt;
  // Bytes of `salt`.
  size_t salt_length;
} RootstockNamespace;

// What is cached of a prefix: three parts that follow each other, each whole pages.
typedef struct RootstockFound {
  // Tokens on the device of the replica asked for.
  uint32_t device_tokens;
  // Tokens after those, on host.
  uint32_t host_tokens;
  // Tokens after those, in storage.
  uint32_t storage_tokens;
} RootstockFound;

// A prompt to look up.
typedef struct RootstockPrompt {
  // sizeof(RootstockPrompt).
  uint32_t struct_size;
  // On whose device.
  uint32_t replica;
  // From rootstock_cache_namespace.
  uint64_t namespace_id;
  // The tokens.
  const uint32_t *tokens;
  // How many.
  size_t length;
  // Match so many at most; length - 1 leaves one to compute.
  uint32_t max_tokens;
} RootstockPrompt;

// A generation to ask for. Set everything to 0 first, then what is wanted.
typedef struct RootstockRequest {
  // sizeof(RootstockRequest).
  uint32_t struct_size;
  // Who pays.
  uint32_t tenant;
  // From rootstock_core_namespace.
  uint64_t namespace_id;
  // The prompt.
  const uint32_t *tokens;
  // Tokens of the prompt.
  size_t length;
  // Output tokens at most, 1 or more.
  uint32_t max_tokens;
  // Output tokens before which no stop token ends the request.
  uint32_t min_tokens;
  // Tokens that end the request.
  const uint32_t *stop_tokens;
  // How many.
  size_t stop_count;
  // 1: generate on through stop tokens.
  uint32_t ignore_eos;
  // 1: warms the cache for a turn that may come, below every other request.
  uint32_t speculative;
  // Temperature; 0 is greedy.
  float temperature;
  // 0 (or 1) is off.
  float top_p;
  // 0 is off.
  float min_p;
  // 0 is off.
  uint32_t top_k;
  // Seed of the draws.
  uint64_t seed;
  // What the agent knows: the JSON of `nvext` ({"agent_hints": {"priority": 5},
  // "cache_control": {"type": "ephemeral", "ttl": "5m"}}), or null. What is not understood is
  // ignored, never an error.
  const char *nvext;
  // Bytes of `nvext`.
  size_t nvext_length;
  // Instant at which it ends as expired, 0 for none.
  uint64_t deadline_ns;
  // The host's own handle; echoed in every event.
  uint64_t label;
} RootstockRequest;

// What a row of a step drew.
typedef struct RootstockRowOut {
  // Accepted tokens: 1 to `drafts` + 1 for a row that samples, else none.
  const uint32_t *tokens;
  // How many.
  size_t length;
} RootstockRowOut;

// One event of one request.
typedef struct RootstockEvent {
  // What it tells.
  enum RootstockEventKind kind;
  // Why it ended, with ROOTSTOCK_EVENT_KIND_FINAL.
  enum RootstockReason reason;
  // Ours.
  uint64_t request;
  // The host's.
  uint64_t label;
  // Tokens drawn, with ROOTSTOCK_EVENT_KIND_TOKENS.
  size_t token_count;
  // Tokens of the prompt.
  uint32_t prompt_tokens;
  // Prompt tokens found on the device.
  uint32_t cached_device_tokens;
  // Prompt tokens found on host.
  uint32_t cached_host_tokens;
  // Prompt tokens found in storage.
  uint32_t cached_storage_tokens;
  // Tokens generated, with ROOTSTOCK_EVENT_KIND_FINAL.
  uint32_t completion_tokens;
  // Times it gave way, with ROOTSTOCK_EVENT_KIND_FINAL.
  uint32_t preemptions;
} RootstockEvent;

// Complete pages that a host has computed.
typedef struct RootstockSpan {
  // sizeof(RootstockSpan).
  uint32_t struct_size;
  // Whose pages.
  uint64_t lease;
  // Where they were allocated.
  uint64_t allocation;
  // Importance; higher stays longer.
  int32_t priority;
  // Seconds of idleness after which `priority` holds no longer; 0 is never.
  uint32_t retention_s;
  // 1: a page that the cache already has stays the host's own (its block tables cannot
  // change).
  uint32_t keep_duplicates;
  // The tokens that follow the lease: as many as fill whole pages.
  const uint32_t *tokens;
  // How many tokens.
  size_t length;
  // Last step that may still touch the pages, 0 for none.
  uint64_t busy_until;
} RootstockSpan;

// An entry of the host's block table that changes: the cache already had this page.
typedef struct RootstockSwap {
  // Index of the page in the prompt.
  uint32_t index;
  // The page to use from now on.
  uint32_t page;
} RootstockSwap;

// Room for swaps, and how many there are.
typedef struct RootstockSwaps {
  // Room for `capacity` entries.
  struct RootstockSwap *entries;
  // At least the number of pages of the span.
  size_t capacity;
  // Set by the call.
  size_t count;
} RootstockSwaps;

// A copy to carry out and then to acknowledge, once, by rootstock_cache_copy_done or
// rootstock_core_copy_done.
typedef struct RootstockCopy {
  // Id.
  uint64_t id;
  // From which tier: a replica's number for its device, 65536 for host, 65537 for storage.
  uint32_t from_tier;
  // To which.
  uint32_t to_tier;
  // First layer.
  uint32_t first_layer;
  // Layers.
  uint32_t layers;
  // Pages.
  uint32_t count;
  // 1: a request waits for it.
  uint32_t urgent;
} RootstockCopy;

// One request's part of a step: it computes `length` positions from `first_position` on.
typedef struct RootstockRow {
  // The request.
  uint64_t request;
  // Its namespace.
  uint64_t namespace_id;
  // Index of its first input token in `tokens`; there are `length`.
  uint32_t first_token;
  // Position of the first input token in the request.
  uint32_t first_position;
  // Positions to compute.
  uint32_t length;
  // Index of its block table in `page_tables`.
  uint32_t first_page;
  // Pages of its block table: position p is on entry p / page_tokens, slot p % page_tokens.
  uint32_t pages;
  // 1: the token after the last position is to be drawn.
  uint32_t sample;
  // Index of the drawn token in the output.
  uint32_t output_index;
  // Tokens that may be guessed and verified beyond the drawn one.
  uint32_t drafts;
  // 0: the first input token is in `tokens`. Else it is the one that row `from_row` of this
  // step drew.
  uint64_t from_step;
  // See `from_step`.
  uint32_t from_row;
  // Temperature; 0 is greedy.
  float temperature;
  // Keep the smallest set of tokens of this probability; 1 is off.
  float top_p;
  // Drop tokens less probable than this share of the best; 0 is off.
  float min_p;
  // Keep so many tokens; 0 is off.
  uint32_t top_k;
  // Seed of the draws; a draw is a function of it, of `output_index` and of the logits.
  uint64_t seed;
} RootstockRow;

// Where the arrays of a plan are. They live until rootstock_plan_free.
typedef struct RootstockPlanView {
  // Id, ascending from 1 in each replica.
  uint64_t step;
  // Whose pages the tables name.
  uint32_t replica;
  // Rows.
  const struct RootstockRow *rows;
  // How many; 0 when there are copies only.
  size_t row_count;
  // Input tokens of all rows.
  const uint32_t *tokens;
  // How many.
  size_t token_count;
  // Block tables of all rows.
  const uint32_t *page_tables;
  // How many entries.
  size_t page_count;
  // Copies to begin before the step.
  const struct RootstockCopy *copies;
  // How many.
  size_t copy_count;
  // Pages of all copies, one after the other: of each its sources, then its destinations.
  const uint32_t *copy_pages;
  // Copies that must have ended before the step.
  const uint64_t *after;
  // How many.
  size_t after_count;
} RootstockPlanView;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the ABI that this library has; compare it with `ROOTSTOCK_ABI_VERSION`.
uint32_t rootstock_abi_version(void);

// The version of Rootstock, as text that ends with 0 and is never freed.
const char *rootstock_version(void);

// Carries out a verb; what is refused is ROOTSTOCK_STATUS_REFUSED.
//
// # Safety
// `cache` is live, `action` as its structure says, `outcome` has room.
enum RootstockStatus rootstock_cache_act(struct RootstockCache *cache,
                                         const struct RootstockAction *action,
                                         uint64_t now_ns,
                                         struct RootstockOutcome *outcome);

// Carries out a verb; what is refused is ROOTSTOCK_STATUS_REFUSED.
//
// # Safety
// `core` is live, `action` as its structure says, `outcome` has room.
enum RootstockStatus rootstock_core_act(struct RootstockCore *core,
                                        const struct RootstockAction *action,
                                        uint64_t now_ns,
                                        struct RootstockOutcome *outcome);

// A cache of the configuration `config`, JSON with the fields of CacheConfig:
// {"page_tokens": 16, "device_pages": [1024], "host_pages": 4096, "policy": "agent"}.
// Free it with rootstock_cache_free.
//
// # Safety
// `config` has `config_length` bytes; `cache` has room for one pointer.
enum RootstockStatus rootstock_cache_new(const char *config,
                                         size_t config_length,
                                         struct RootstockCache **cache);

// Frees a cache with all its leases and allocations. Null is nothing.
//
// # Safety
// `cache` came from rootstock_cache_new, is not used by another thread, and never again.
void rootstock_cache_free(struct RootstockCache *cache);

// The id of a namespace; the same namespace always has the same.
//
// # Safety
// `cache` is live, `namespace` as its structure says, `id` has room for one number.
enum RootstockStatus rootstock_cache_namespace(struct RootstockCache *cache,
                                               const struct RootstockNamespace *namespace_,
                                               uint64_t *id);

// Looks a prefix up and changes nothing.
//
// # Safety
// `cache` is live, `tokens` has `length` tokens, `found` has room.
enum RootstockStatus rootstock_cache_probe(struct RootstockCache *cache,
                                           uint64_t namespace_,
                                           const uint32_t *tokens,
                                           size_t length,
                                           uint32_t replica_id,
                                           struct RootstockFound *found);

// Matches a prompt and leases what is on the device: it stays until rootstock_cache_end. What is
// on host comes up by rootstock_cache_promote.
//
// # Safety
// `cache` is live, `prompt` as its structure says, `lease` and `found` have room.
enum RootstockStatus rootstock_cache_match(struct RootstockCache *cache,
                                           const struct RootstockPrompt *prompt,
                                           uint64_t now_ns,
                                           uint64_t *lease,
                                           struct RootstockFound *found);

// Ends a lease; `fate` is a RootstockFate.
//
// # Safety
// `cache` is live.
enum RootstockStatus rootstock_cache_end(struct RootstockCache *cache,
                                         uint64_t lease,
                                         uint32_t fate,
                                         uint64_t now_ns);

// Acknowledges a copy, once; `ok` is false when it did not happen.
//
// # Safety
// `cache` is live.
enum RootstockStatus rootstock_cache_copy_done(struct RootstockCache *cache,
                                               uint64_t copy,
                                               bool ok,
                                               uint64_t now_ns);

// Says that no step up to `step` of a replica touches pages any more.
//
// # Safety
// `cache` is live.
enum RootstockStatus rootstock_cache_step_done(struct RootstockCache *cache,
                                               uint32_t replica_id,
                                               uint64_t step);

// Lets time pass: pins expire without traffic.
//
// # Safety
// `cache` is live.
enum RootstockStatus rootstock_cache_tick(struct RootstockCache *cache, uint64_t now_ns);

// Empties all tiers; with leases, allocations or copies out nothing changes
// (ROOTSTOCK_STATUS_REFUSED).
//
// # Safety
// `cache` is live.
enum RootstockStatus rootstock_cache_flush(struct RootstockCache *cache, uint64_t now_ns);

// Recounts everything from scratch; for tests.
//
// # Safety
// `cache` is live.
enum RootstockStatus rootstock_cache_check(struct RootstockCache *cache);

// The counters as JSON, the fields of CacheStats. `length` is what is needed, without a final 0.
//
// # Safety
// `cache` is live, `buffer` has room for `capacity` bytes, `length` for one number.
enum RootstockStatus rootstock_cache_stats(struct RootstockCache *cache,
                                           char *buffer,
                                           size_t capacity,
                                           size_t *length);

// A core of the configuration `config`, JSON with the fields of CoreConfig:
// {"cache": {"page_tokens": 16, "device_pages": [1024]}, "scheduler": {"max_running": 64}}.
// Free it with rootstock_core_free.
//
// # Safety
// `config` has `config_length` bytes; `core` has room for one pointer.
enum RootstockStatus rootstock_core_new(const char *config,
                                        size_t config_length,
                                        struct RootstockCore **core);

// Frees a core with all its requests. Null is nothing.
//
// # Safety
// `core` came from rootstock_core_new, is not used by another thread, and never again.
void rootstock_core_free(struct RootstockCore *core);

// The id of a namespace; the same namespace always has the same.
//
// # Safety
// `core` is live, `namespace` as its structure says, `id` has room for one number.
enum RootstockStatus rootstock_core_namespace(struct RootstockCore *core,
                                              const struct RootstockNamespace *namespace_,
                                              uint64_t *id);

// Queues a request. ROOTSTOCK_STATUS_FULL: the queue is full, try after `retry_after_s` seconds.
// ROOTSTOCK_STATUS_REFUSED: it can never run.
//
// # Safety
// `core` is live, `request` as its structure says, `id` has room for one number,
// `retry_after_s` is null or has.
enum RootstockStatus rootstock_core_add(struct RootstockCore *core,
                                        const struct RootstockRequest *request,
                                        uint64_t now_ns,
                                        uint64_t *id,
                                        uint32_t *retry_after_s);

// Ends a request: as aborted, or with `finished` 1 as finished by a stop string of the host's.
//
// # Safety
// `core` is live.
enum RootstockStatus rootstock_core_end(struct RootstockCore *core,
                                        uint64_t request,
                                        uint32_t finished,
                                        uint64_t now_ns);

// The next plan of a replica; null when there is nothing to do until something changes. Free it
// with rootstock_plan_free.
//
// # Safety
// `core` is live, `plan` has room for one pointer.
enum RootstockStatus rootstock_core_schedule(struct RootstockCore *core,
                                             uint32_t replica_id,
                                             uint64_t now_ns,
                                             struct RootstockPlan **plan);

// Takes the output of a step: one entry a row, in the order of the plan.
//
// # Safety
// `core` is live, `rows` has `row_count` entries, each as its structure says.
enum RootstockStatus rootstock_core_complete(struct RootstockCore *core,
                                             uint32_t replica_id,
                                             uint64_t step,
                                             const struct RootstockRowOut *rows,
                                             size_t row_count,
                                             uint64_t now_ns);

// Gives up a step that failed: its requests end, nothing of them is matchable.
//
// # Safety
// `core` is live.
enum RootstockStatus rootstock_core_fail_step(struct RootstockCore *core,
                                              uint32_t replica_id,
                                              uint64_t step,
                                              uint64_t now_ns);

// Acknowledges a copy of a plan, once; `ok` is false when it did not happen.
//
// # Safety
// `core` is live.
enum RootstockStatus rootstock_core_copy_done(struct RootstockCore *core,
                                              uint64_t copy,
                                              bool ok,
                                              uint64_t now_ns);

// Lets time pass: deadlines and pins expire without traffic.
//
// # Safety
// `core` is live.
enum RootstockStatus rootstock_core_tick(struct RootstockCore *core, uint64_t now_ns);

// Empties all tiers, or changes nothing (ROOTSTOCK_STATUS_REFUSED).
//
// # Safety
// `core` is live.
enum RootstockStatus rootstock_core_flush(struct RootstockCore *core, uint64_t now_ns);

// Recounts everything from scratch; for tests.
//
// # Safety
// `core` is live.
enum RootstockStatus rootstock_core_check(struct RootstockCore *core);

// The counters as JSON, the fields of CoreStats. `length` is what is needed, without a final 0.
//
// # Safety
// `core` is live, `buffer` has room for `capacity` bytes, `length` for one number.
enum RootstockStatus rootstock_core_stats(struct RootstockCore *core,
                                          char *buffer,
                                          size_t capacity,
                                          size_t *length);

// The next event, ROOTSTOCK_EVENT_KIND_NOTHING when there is none. `tokens` gets what was
// drawn; with too little room the event stays and `event->token_count` says how much is needed.
//
// # Safety
// `core` is live, `event` has room, `tokens` has room for `capacity` tokens.
enum RootstockStatus rootstock_core_next_event(struct RootstockCore *core,
                                               struct RootstockEvent *event,
                                               uint32_t *tokens,
                                               size_t capacity);

// The ids of the device pages of a lease, in the order of the prompt.
//
// # Safety
// `cache` is live, `pages` has room for `capacity` ids, `length` for one number.
enum RootstockStatus rootstock_lease_pages(struct RootstockCache *cache,
                                           uint64_t lease,
                                           uint32_t *pages,
                                           size_t capacity,
                                           size_t *length);

// Allocates `count` device pages, all or none (ROOTSTOCK_STATUS_SHORT), evicting what is worth
// least.
//
// The copies that this begins are fetched by rootstock_cache_next_copy.
//
// # Safety
// `cache` is live, `pages` has room for `count` ids, `allocation` for one number.
enum RootstockStatus rootstock_cache_allocate(struct RootstockCache *cache,
                                              uint32_t replica_id,
                                              uint32_t count,
                                              uint64_t now_ns,
                                              uint32_t *pages,
                                              uint64_t *allocation);

// Gives an allocation back. `busy_until` is the last step that may still touch its pages, 0 for
// none.
//
// # Safety
// `cache` is live.
enum RootstockStatus rootstock_cache_release(struct RootstockCache *cache,
                                             uint64_t allocation,
                                             uint64_t busy_until);

// Makes at least `count` pages of a replica's device free, all or none.
//
// # Safety
// `cache` is live; `freed` and `pins_yielded` are null or have room for one number each.
enum RootstockStatus rootstock_cache_make_room(struct RootstockCache *cache,
                                               uint32_t replica_id,
                                               uint32_t count,
                                               uint64_t now_ns,
                                               uint32_t *freed,
                                               uint32_t *pins_yielded);

// Makes computed pages matchable: the first pages of the allocation, as many as the span fills,
// go to the lease. The host then changes its block table as `swaps` says; the duplicates are
// released.
//
// # Safety
// `cache` is live, `span` as its structure says, `swaps` is initialised and has the room it
// says.
enum RootstockStatus rootstock_cache_extend(struct RootstockCache *cache,
                                            const struct RootstockSpan *span,
                                            uint64_t now_ns,
                                            struct RootstockSwaps *swaps);

// Extends a lease over what others have made matchable since; `gained` is in tokens.
//
// # Safety
// `cache` is live, `prompt` as its structure says, `gained` has room for one number.
enum RootstockStatus rootstock_cache_grow(struct RootstockCache *cache,
                                          uint64_t lease,
                                          const struct RootstockPrompt *prompt,
                                          uint64_t now_ns,
                                          uint32_t *gained);

// Begins to copy up `pages` pages that a match found on host after the lease. Gives the copy's
// id; 0 when there is nothing to copy. After its acknowledgement rootstock_cache_grow takes
// them up.
//
// # Safety
// `cache` is live, `copy` has room for one number.
enum RootstockStatus rootstock_cache_promote(struct RootstockCache *cache,
                                             uint64_t lease,
                                             uint32_t pages,
                                             uint64_t now_ns,
                                             uint64_t *copy);

// The next copy to carry out. `from` and `to` get its page ids; with too little room nothing
// changes and `copy->count` says how much is needed. `copy->id` is 0 when there is none.
//
// # Safety
// `cache` is live, `copy` has room, `from` and `to` have room for `capacity` ids each.
enum RootstockStatus rootstock_cache_next_copy(struct RootstockCache *cache,
                                               struct RootstockCopy *copy,
                                               uint32_t *from,
                                               uint32_t *to,
                                               size_t capacity);

// The arrays of a plan.
//
// # Safety
// `plan` is live, `view` has room.
enum RootstockStatus rootstock_plan_view(const struct RootstockPlan *plan,
                                         struct RootstockPlanView *view);

// Frees a plan. Null is nothing. The step itself stays out until it is completed or failed.
//
// # Safety
// `plan` came from rootstock_core_schedule and is never used again.
void rootstock_plan_free(struct RootstockPlan *plan);

// Writes why the last call of this thread that failed did so, as text that ends with 0, cut to
// `size` bytes. Gives the length of the whole text without that 0; `buffer` may be null to ask.
//
// # Safety
// `buffer` is null or has room for `size` bytes.
size_t rootstock_last_error(char *buffer, size_t size);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus
