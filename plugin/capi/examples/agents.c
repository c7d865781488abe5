// A host in C: agents that share a system prompt, served through cache and scheduler (depth two), and
// then through the cache alone (depth one). The model is a sum over what the block table points to, so
// a wrong page gives a wrong text.
//
//   cc examples/agents.c -Iinclude -lrootstock -o agents && ./agents [ROUNDS]
//
// With many rounds it prints its resident memory, which does not grow.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rootstock.h"

enum { PAGE = 4, PAGES = 64, AGENTS = 3, PROMPT = 14, ANSWER = 6 };

static void check(RootstockStatus status, const char *what) {
  if (status == ROOTSTOCK_STATUS_OK) return;
  char text[256];
  rootstock_last_error(text, sizeof text);
  fprintf(stderr, "%s: status %d: %s\n", what, status, text);
  exit(1);
}

// One number a slot: what a real model would keep as K and V.
static uint32_t kv[(PAGES + 1) * PAGE];

// Computes the positions of one row onto its pages and draws the next token.
static uint32_t forward(const RootstockPlanView *plan, const RootstockRow *row, uint32_t drawn) {
  const uint32_t *table = plan->page_tables + row->first_page;
  for (uint32_t i = 0; i < row->length; i++) {
    uint32_t token = row->from_step && i == 0 ? drawn : plan->tokens[row->first_token + i];
    uint32_t position = row->first_position + i;
    kv[table[position / PAGE] * PAGE + position % PAGE] = token * 3 + 1;
  }
  uint32_t sum = 1;
  for (uint32_t p = 0; p < row->first_position + row->length; p++)
    sum = (sum ^ kv[table[p / PAGE] * PAGE + p % PAGE]) * 0x01000193u;
  return sum % 500;
}

static void run_step(RootstockCore *core, RootstockPlan *plan, uint64_t now) {
  RootstockPlanView view;
  check(rootstock_plan_view(plan, &view), "plan_view");
  uint32_t drawn[AGENTS];
  RootstockRowOut rows[AGENTS];
  for (size_t i = 0; i < view.row_count; i++) {
    drawn[i] = forward(&view, &view.rows[i], 0);
    rows[i] = (RootstockRowOut){.tokens = &drawn[i], .length = view.rows[i].sample};
  }
  // This host has no lower tier, so no plan has copies.
  check(rootstock_core_complete(core, view.replica, view.step, rows, view.row_count, now), "complete");
  rootstock_plan_free(plan);
}

static RootstockNamespace model(void) {
  return (RootstockNamespace){.struct_size = sizeof(RootstockNamespace),
                              .model = "toy", .model_length = 3,
                              .numerics = "c", .numerics_length = 1};
}

// Serves all agents together; returns the prompt tokens that were cached.
static uint32_t serve(RootstockCore *core, uint64_t ns, uint64_t *now, int print) {
  static const char hints[] = "{\"agent_hints\": {\"priority\": 3}}";
  for (uint32_t agent = 0; agent < AGENTS; agent++) {
    uint32_t prompt[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++) prompt[i] = i < 12 ? i + 1 : 40 + agent;
    RootstockRequest request = {.struct_size = sizeof request, .namespace_id = ns,
                                .tokens = prompt, .length = PROMPT, .max_tokens = ANSWER,
                                .nvext = hints, .nvext_length = sizeof hints - 1,
                                .label = agent};
    uint64_t id;
    check(rootstock_core_add(core, &request, *now, &id, NULL), "add");
  }
  uint32_t cached = 0;
  for (int finished = 0; finished < AGENTS;) {
    *now += 1000000;
    RootstockPlan *plan;
    check(rootstock_core_schedule(core, 0, *now, &plan), "schedule");
    if (plan) run_step(core, plan, *now);
    for (;;) {
      RootstockEvent event;
      uint32_t tokens[8];
      check(rootstock_core_next_event(core, &event, tokens, 8), "next_event");
      if (event.kind == ROOTSTOCK_EVENT_KIND_NOTHING) break;
      if (event.kind != ROOTSTOCK_EVENT_KIND_FINAL) continue;
      cached += event.cached_device_tokens;
      finished++;
      if (print)
        printf("agent %llu: %u tokens, %u of %u prompt tokens were cached\n",
               (unsigned long long)event.label, event.completion_tokens,
               event.cached_device_tokens, event.prompt_tokens);
    }
  }
  return cached;
}

static void with_scheduler(long rounds) {
  static const char config[] =
      "{\"cache\": {\"page_tokens\": 4, \"device_pages\": [64]}, \"scheduler\": {\"max_model_len\": 64}}";
  RootstockCore *core;
  check(rootstock_core_new(config, sizeof config - 1, &core), "core_new");
  RootstockNamespace key = model();
  uint64_t ns, now = 0;
  check(rootstock_core_namespace(core, &key, &ns), "namespace");
  serve(core, ns, &now, 1);
  uint32_t cached = serve(core, ns, &now, 1);
  if (cached != AGENTS * 12) {
    fprintf(stderr, "%u tokens were cached, %d expected\n", cached, AGENTS * 12);
    exit(1);
  }
  for (long i = 0; i < rounds; i++) serve(core, ns, &now, 0);
  check(rootstock_core_check(core), "check");
  rootstock_core_free(core);
}

// One request of a host that schedules itself; returns what was cached.
static uint32_t by_hand(RootstockCache *cache, uint64_t ns, const uint32_t *tokens, uint32_t length,
                        uint64_t now) {
  RootstockPrompt prompt = {.struct_size = sizeof prompt, .namespace_id = ns, .tokens = tokens,
                            .length = length, .max_tokens = length - 1};
  RootstockFound found;
  uint64_t lease, allocation;
  check(rootstock_cache_match(cache, &prompt, now, &lease, &found), "match");
  uint32_t rest = (length - found.device_tokens) / PAGE, pages[PAGES];
  if (rest > 0) {
    check(rootstock_cache_allocate(cache, 0, rest, now, pages, &allocation), "allocate");
    // (compute KV onto `pages`)
    RootstockSwap entries[PAGES];
    RootstockSwaps swaps = {.entries = entries, .capacity = PAGES};
    RootstockSpan span = {.struct_size = sizeof span, .lease = lease, .allocation = allocation,
                          .tokens = tokens + found.device_tokens, .length = rest * PAGE};
    check(rootstock_cache_extend(cache, &span, now, &swaps), "extend");
  }
  check(rootstock_cache_end(cache, lease, ROOTSTOCK_FATE_KEEP, now), "end");
  return found.device_tokens;
}

static void cache_alone(long rounds) {
  static const char config[] = "{\"page_tokens\": 4, \"device_pages\": [64], \"policy\": \"lru\"}";
  RootstockCache *cache;
  check(rootstock_cache_new(config, sizeof config - 1, &cache), "cache_new");
  RootstockNamespace key = model();
  uint64_t ns, now = 0;
  check(rootstock_cache_namespace(cache, &key, &ns), "namespace");
  uint32_t tokens[32];
  for (uint32_t i = 0; i < 32; i++) tokens[i] = i + 1;
  by_hand(cache, ns, tokens, 32, now);
  RootstockAction pin = {.struct_size = sizeof pin, .verb = ROOTSTOCK_VERB_PIN, .seconds = 60,
                         .namespace_id = ns, .tokens = tokens, .length = 32};
  RootstockOutcome outcome;
  check(rootstock_cache_act(cache, &pin, now, &outcome), "pin");
  printf("pinned %u pages\n", outcome.pages);
  uint32_t other[32];
  for (long i = 0; i < rounds + 50; i++) {
    now += 1000;
    for (uint32_t k = 0; k < 32; k++) other[k] = 1000 + (uint32_t)i * 32 + k;
    by_hand(cache, ns, other, 32, now);
  }
  uint32_t cached = by_hand(cache, ns, tokens, 32, now);
  printf("after a flood %u of 32 tokens are cached\n", cached);
  if (cached != 28) exit(1);
  if (rootstock_cache_end(cache, 12345678, ROOTSTOCK_FATE_KEEP, now) != ROOTSTOCK_STATUS_UNKNOWN) exit(1);
  check(rootstock_cache_check(cache), "check");
  rootstock_cache_free(cache);
}

static long resident_kib(void) {
  FILE *file = fopen("/proc/self/statm", "r");
  long total = 0, resident = 0;
  if (file) {
    if (fscanf(file, "%ld %ld", &total, &resident) != 2) resident = 0;
    fclose(file);
  }
  return resident * 4;
}

int main(int argc, char **argv) {
  long rounds = argc > 1 ? atol(argv[1]) : 0;
  if (rootstock_abi_version() != ROOTSTOCK_ABI_VERSION) return 1;
  printf("rootstock %s\n", rootstock_version());
  with_scheduler(rounds / 10);
  cache_alone(rounds / 10);
  long before = resident_kib();
  with_scheduler(rounds);
  cache_alone(rounds);
  printf("resident %ld KiB before, %ld KiB after\n", before, resident_kib());
  return 0;
}
