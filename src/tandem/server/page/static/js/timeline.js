// A request's record as a waterfall: one bar a phase, on one axis, and the reasons beside it.

import { draw, make } from "/page/js/dom.js";

/** Return the elements of a `RequestTimeline`. */
export function drawTimeline(timeline) {
  const state = timeline.is_ended ? "ended" : "in flight";
  return [
    make("h3", {}, make("span", { class: "mono" }, timeline.id)),
    make("p", {}, `${timeline.path}, ${state} after ${time(timeline.age_s)}.`),
    ...timeline.choices.flatMap((choice) => drawChoice(timeline, choice)),
  ];
}

function drawChoice(timeline, choice) {
  const { rows, facts } = readChoice(timeline, choice);
  const title = timeline.choices.length > 1 ? make("h4", {}, `Choice ${choice.index}`) : null;
  return [
    title,
    make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Phases" }, drawBars(rows, timeline.age_s)),
    make("ul", { class: "facts" }, facts.map((fact) => make("li", {}, fact))),
  ].filter(Boolean);
}

/** Return the phases of a choice, `{name, kind, begin, end, note}`, and facts as sentences. */
export function readChoice(timeline, choice) {
  const rows = [{ name: "read, tokenized", kind: "edge", begin: 0, end: timeline.tokenized_s, note: "" }];
  const facts = [];
  const told = [...choice.instances].sort((a, b) => beginOf(a) - beginOf(b));
  for (const each of told) {
    const zero = choice.submitted_s + each.sent_s;
    const prefix = told.length > 1 ? `${each.instance}: ` : "";
    const endOf = told.length > 1 ? null : choice.end_s;
    rows.push(...readPhases(each, zero, endOf).map((row) => ({ ...row, name: prefix + row.name })));
    facts.push(...readFacts(each));
  }
  if (!told.length) {
    rows.push({ name: "at the instance", kind: "queue", begin: choice.submitted_s, end: choice.end_s ?? timeline.age_s, note: "" });
    facts.push("The instance is down, or remembers nothing of it.");
  }
  const end = choice.end_s === null ? "It goes on." : `It ended: ${choice.finish_reason}.`;
  facts.push(`${choice.prompt_tokens} tokens of prompt, ${choice.output_tokens} generated. ${end}`);
  return { rows, facts };
}

function beginOf(told) {
  return told.sent_s + (told.admitted_s ?? told.age_s);
}

function readPhases(told, zero, ended) {
  const rows = [];
  const looked = told.lookup?.seconds ?? 0;
  if (told.lookup) rows.push({ name: "lookup", kind: "load", begin: zero, end: zero + looked, note: "" });
  const admitted = told.admitted_s ?? told.age_s;
  rows.push({ name: "queue", kind: "queue", begin: zero + looked, end: zero + admitted, note: "" });
  for (const load of told.loads) {
    const note = `${load.loaded_blocks} of ${load.asked_blocks} blocks from ${load.source}`;
    rows.push({ name: "load", kind: "load", begin: zero + load.begin_s, end: zero + (load.end_s ?? told.age_s), note });
  }
  if (told.admitted_s === null) return rows;
  let first = told.first_token_s ?? told.age_s;
  if (told.num_prefill_steps) {
    rows.push({ name: "prefill", kind: "prefill", begin: zero + admitted, end: zero + first, note: `${told.num_prefill_steps} steps` });
  } else {
    first = admitted;
  }
  if (told.first_token_s !== null && told.num_decode_steps) {
    const end = Math.max(ended ?? zero + told.age_s, zero + first);
    rows.push({ name: "decode", kind: "decode", begin: zero + first, end, note: `${told.num_decode_steps} steps` });
  }
  return rows;
}

function readFacts(told) {
  const facts = [];
  const name = told.instance ? `${told.instance} (${told.role})` : told.role;
  if (told.admitted_s === null) facts.push(`${name}: ${told.state}, not admitted yet.`);
  else {
    facts.push(
      `${name}: ${told.device_tokens} prompt tokens from the device, ${told.loaded_tokens} loaded, ` +
        `${told.computed_tokens} computed.`,
    );
  }
  if (told.considered.length > 1) {
    const list = told.considered.map((each) => `${each.instance} ${time(each.ttft_s)}`).join(", ");
    const real = told.real_ttft_s === null ? "" : `; it came after ${time(told.real_ttft_s)}`;
    facts.push(`First token predicted: ${list}${real}.`);
  }
  if (told.lookup) {
    const found = told.lookup.is_answered ? `${told.lookup.found_blocks} found` : "no answer";
    facts.push(`The store was asked for ${told.lookup.asked_blocks} blocks: ${found}.`);
  }
  if (told.miss) {
    const detail = told.miss.detail ? ` (${told.miss.detail})` : "";
    facts.push(`Computed from prompt token ${told.miss.position} on; reason: ${told.miss.reason.replaceAll("_", " ")}${detail}.`);
  }
  if (told.deferred_steps) facts.push(`Waited ${told.deferred_steps} steps for another request that computed its prefix.`);
  if (told.num_preemptions) facts.push(`Preempted ${told.num_preemptions} times.`);
  return facts;
}

// Widths of the picture, of the names on its left and of the times on its right.
const WIDE = { width: 760, label: 170, note: 210, ticks: 4 };
const NARROW = { width: 350, label: 116, note: 64, ticks: 2 };
const ROW = 26;

function drawBars(rows, total) {
  const isNarrow = window.matchMedia("(max-width: 800px)").matches;
  const { width, label, note, ticks } = isNarrow ? NARROW : WIDE;
  const height = rows.length * ROW + 24;
  const x = (seconds) => label + (total > 0 ? Math.min(seconds / total, 1) : 0) * (width - label - note);
  const words = rows.map((row) => `${row.name} ${time(row.end - row.begin)}`).join(", ");
  const picture = draw("svg", {
    class: "waterfall", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Timeline: ${words}`,
  });
  for (let tick = 0; tick <= ticks; tick++) {
    const at = (total * tick) / ticks;
    picture.append(
      draw("line", { x1: x(at), x2: x(at), y1: 0, y2: height - 20, class: "grid-line" }),
      draw("text", { x: x(at), y: height - 6, class: "tick", "text-anchor": tick === 0 ? "start" : "middle" }, time(at)),
    );
  }
  rows.forEach((row, index) => {
    const y = index * ROW;
    picture.append(
      draw("text", { x: 0, y: y + 16, class: "row-name" }, row.name),
      draw("rect", { x: x(row.begin), y: y + 4, width: Math.max(x(row.end) - x(row.begin), 2), height: 16, rx: 3, class: `phase ${row.kind}` }),
      draw("text", { x: x(row.end) + 8, y: y + 16, class: "tick" }, `${time(row.end - row.begin)}${row.note && !isNarrow ? `, ${row.note}` : ""}`),
    );
  });
  return picture;
}

/** Return a time with its unit. */
export function time(seconds) {
  if (Math.abs(seconds) < 0.0995) return `${(seconds * 1e3).toFixed(1)} ms`;
  return Math.abs(seconds) < 1 ? `${(seconds * 1e3).toFixed(0)} ms` : `${seconds.toFixed(2)} s`;
}
