// How the server fares: read every two seconds while somebody looks, from two public endpoints.

import { ask, askJson } from "/page/js/api.js";
import { at, make, show } from "/page/js/dom.js";
import { TimeChart, drawBars } from "/page/js/charts.js";
import { buckets, parseMetrics, quantile, since, size, total } from "/page/js/metrics.js";
import { drawPlacement } from "/page/js/placement.js";
import { time } from "/page/js/timeline.js";

const EVERY_MS = 2000;
const KEPT = 300;

let charts = [];
let timer = 0;
let before = null; // The last reading: moment and counters.
let begun = null; // Histograms of the first reading.
let shownPlan = "";
let railsBefore = null;

/** Build the view; nothing is read before it is shown. */
export function makeLive() {
  const card = (id, title, ...children) =>
    make("section", { class: "card", id: `card-${id}`, "aria-labelledby": `title-${id}` }, make("h2", { id: `title-${id}` }, title), ...children);
  const hold = (id) => make("div", { id });
  show(
    at("view-live"),
    make("p", { id: "live-error", class: "notice", role: "alert", hidden: true }),
    make("dl", { id: "numbers", class: "numbers" }),
    make(
      "div",
      { class: "cards" },
      card("speed", "Tokens a second"),
      card("blocks", "KV blocks by tier"),
      card("hits", "Prompt tokens found in caches"),
      card("ttft", "Time to the first token", hold("ttft")),
      card("tbt", "Time between tokens", hold("tbt")),
      card("instances", "Instances", hold("instances")),
      card("store", "Store", hold("store")),
      card("rails", "Transfer", hold("rails")),
      card("placement", "What is where", hold("placement")),
    ),
  );
  const percent = (share) => `${(share * 100).toFixed(0)} %`;
  const count = (value) => (value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1));
  const whole = (value) => value.toFixed(0);
  charts = {
    speed: new TimeChart(at("card-speed"), { title: "Tokens a second", format: count, series: [{ name: "generated", colour: "c1", fill: true }, { name: "prompt", colour: "c2" }] }),
    blocks: new TimeChart(at("card-blocks"), { title: "KV blocks by tier", format: whole, whole: true, series: [{ name: "device", colour: "c2", fill: true }, { name: "of these in use", colour: "c1", fill: true }, { name: "store", colour: "c3" }] }),
    hits: new TimeChart(at("card-hits"), { title: "Share of prompt tokens found", format: percent, top: 1, series: [{ name: "on the device", colour: "c1" }, { name: "in the store", colour: "c3" }] }),
  };
}

/** Begin to read, or stop. */
export function watch(isOn) {
  clearTimeout(timer);
  timer = 0;
  if (isOn) read();
}

/** Draw the charts in the colours of another theme. */
export function recolour() {
  Object.values(charts).forEach((chart) => chart.plot && chart.build());
}

async function read() {
  const mine = (timer = -1);
  try {
    const [text, info] = await Promise.all([ask("/metrics").then((reply) => reply.text()), askJson("/server_info")]);
    at("live-error").hidden = true;
    take(parseMetrics(text), info);
  } catch (error) {
    at("live-error").hidden = false;
    at("live-error").textContent = error.message;
    before = null;
  }
  if (timer === mine && !at("view-live").hidden) timer = setTimeout(document.hidden ? wait : read, EVERY_MS);
}

function wait() {
  timer = setTimeout(document.hidden ? wait : read, EVERY_MS);
}

function take(found, info) {
  const now = Date.now() / 1000;
  const counters = {
    at: now,
    generated: total(found, "generation_tokens_total"),
    prompt: total(found, "prompt_tokens_total"),
    asked: total(found, "prefix_cache_queries_total"),
    hits: total(found, "prefix_cache_hits_total"),
    stored: total(found, "external_prefix_cache_hits_total"),
  };
  const rate = (name) => (before === null || counters[name] === null || before[name] === null ? null : Math.max(counters[name] - before[name], 0) / (now - before.at));
  const used = total(found, "kv_cache_used_blocks");
  const cached = total(found, "kv_cache_cached_blocks");
  charts.speed.push(now, [rate("generated"), rate("prompt")], KEPT);
  charts.blocks.push(now, [used === null ? null : used + cached, used, info.store?.num_objects ?? null], KEPT);
  const asked = before === null ? 0 : counters.asked - before.asked;
  const share = (value) => (asked > 0 ? value / asked : (charts.hits.data[1].length ? undefined : null));
  const store = before === null ? 0 : counters.stored - before.stored;
  const device = before === null ? 0 : counters.hits - before.hits - store;
  charts.hits.push(now, [keepLast(share(device), 1), keepLast(share(store), 2)], KEPT);
  const seconds = before === null ? 0 : now - before.at;
  before = counters;
  showNumbers(info);
  const histograms = { ttft: buckets(found, "time_to_first_token_seconds"), tbt: buckets(found, "inter_token_latency_seconds") };
  begun ??= histograms;
  showDistribution("ttft", histograms, "Requests by time to the first token");
  showDistribution("tbt", histograms, "Pauses by their length");
  showInstances(info);
  showStore(info, found);
  showRails(info, seconds);
  const plan = JSON.stringify(info.instance?.kv_identity ?? "");
  if (info.instance && plan !== shownPlan) {
    shownPlan = plan;
    show(at("placement"), drawPlacement(info.instance));
  } else if (!info.instance) {
    show(at("placement"), make("p", { class: "hint" }, "No instance is ready: the plan comes with the model."));
    shownPlan = "";
  }
}

// No prompt came since the last reading: the share is what it was.
function keepLast(value, column) {
  return value === undefined ? charts.hits.data[column].at(-1) : value;
}

function showNumbers(info) {
  const stats = info.stats;
  const blocks = stats ? `${stats.num_used_blocks + stats.num_cached_blocks} of ${stats.num_blocks}` : "none";
  const entries = [
    ["Running", stats?.num_running ?? 0],
    ["Waiting", stats?.num_waiting ?? 0],
    ["Tokens generated", (stats?.generated_tokens ?? 0).toLocaleString("en")],
    ["KV blocks filled", blocks],
    ["Preempted", stats?.num_preemptions ?? 0],
    ["Version", info.version],
  ];
  show(at("numbers"), entries.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
}

function showDistribution(id, histograms, title) {
  const recent = since(histograms[id], begun[id]);
  const isRecent = recent.some(({ count }) => count > 0);
  const shown = isRecent ? recent : histograms[id];
  const half = quantile(shown, 0.5);
  if (half === null) {
    show(at(id), make("p", { class: "hint" }, "No request has been answered yet."));
    return;
  }
  const span = isRecent ? "since you opened this view" : "since the server started";
  show(
    at(id),
    make("p", { class: "big" }, `${time(half)} `, make("span", { class: "hint" }, `median, 95 of 100 below ${time(quantile(shown, 0.95))}, ${span}`)),
    drawBars(shown, time, title),
  );
}

function showInstances(info) {
  const row = (each) => {
    const stage = each.is_draining ? "draining" : each.stage.stage;
    const filled = each.num_blocks ? (each.num_used_blocks + each.num_cached_blocks) / each.num_blocks : 0;
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, each.name),
      make("td", {}, each.role),
      make("td", {}, make("span", { class: `stage ${stage}` }, stage), each.num_restarts ? ` restarted ${each.num_restarts}×` : ""),
      make("td", { class: "number" }, String(each.num_running ?? 0)),
      make("td", { class: "number" }, String((each.num_waiting ?? 0) + (each.num_loading ?? 0))),
      make("td", {}, meter(filled, `KV blocks of ${each.name} filled`)),
    );
  };
  const heads = ["Name", "Role", "State", "Running", "Queue", "KV filled"];
  show(
    at("instances"),
    make(
      "div",
      { class: "scroll", tabindex: "0", role: "group", "aria-label": "Instances" },
      make("table", {}, make("thead", {}, make("tr", {}, heads.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, info.instances.map(row))),
    ),
  );
}

function meter(share, label) {
  return make("div", { class: "meter" }, make("meter", { min: 0, max: 1, value: share, "aria-label": label }), make("span", { class: "number" }, `${(share * 100).toFixed(0)} %`));
}

function showStore(info, found) {
  const status = info.store;
  const links = found.get("tandem:kv_store_links") ?? [];
  if (!status && !links.length) {
    show(at("store"), make("p", { class: "hint" }, "This server has no store. With --store.memory 8GiB, KV outlives the device's memory and the instance."));
    return;
  }
  const stats = info.stats;
  const parts = [];
  if (status) {
    parts.push(make("p", {}, `The store is ${status.stage}${status.num_restarts ? `, restarted ${status.num_restarts} times` : ""}.`));
    if (status.capacity_bytes) {
      parts.push(make("p", { class: "fill" }, make("span", {}, `Memory ${size(status.used_bytes)} of ${size(status.capacity_bytes)}, ${status.num_objects.toLocaleString("en")} objects`), meter(status.used_bytes / status.capacity_bytes, "Memory of the store filled")));
    }
    if (status.disk_capacity_bytes) {
      parts.push(make("p", { class: "fill" }, make("span", {}, `SSD ${size(status.disk_used_bytes)} of ${size(status.disk_capacity_bytes)}`), meter(status.disk_used_bytes / status.disk_capacity_bytes, "SSD of the store filled")));
    }
  }
  for (const { labels, value } of links) parts.push(make("p", { class: "hint" }, `${value} ${value === 1 ? "instance is" : "instances are"} ${labels.state}.`));
  if (stats) {
    parts.push(make("p", { class: "hint" }, `${stats.stored_blocks.toLocaleString("en")} blocks stored, ${stats.loaded_blocks.toLocaleString("en")} loaded back (${size(stats.loaded_bytes)}).`));
  }
  show(at("store"), parts);
}

function showRails(info, seconds) {
  const stats = info.stats;
  const moved = Object.entries(stats?.rail_bytes ?? {});
  const last = railsBefore;
  railsBefore = stats?.rail_bytes ?? {};
  if (!moved.length) {
    show(at("rails"), make("p", { class: "hint" }, "No instance reads the KV of another. With --prefill 1 --decode 1, prompts are computed by one instance and answered by another."));
    return;
  }
  const heads = ["Rail", "Connections", "Moved", "Now"];
  const rows = moved.map(([rail, bytes]) => {
    const now = last && seconds > 0 && rail in last ? Math.max(bytes - last[rail], 0) / seconds : 0;
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, rail),
      make("td", { class: "number" }, String(stats.rail_links[rail] ?? "shared memory")),
      make("td", { class: "number" }, size(bytes)),
      make("td", { class: "number" }, `${size(now)}/s`),
    );
  });
  show(
    at("rails"),
    make(
      "div",
      { class: "scroll", tabindex: "0", role: "group", "aria-label": "Rails" },
      make("table", {}, make("thead", {}, make("tr", {}, heads.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, rows)),
    ),
    make("p", { class: "hint" }, `${size(stats.peer_read_bytes)} of KV read, ${time(stats.peer_read_hidden_seconds)} of it while the prefill ran, ${time(stats.peer_read_exposed_seconds)} after it.`),
  );
}
