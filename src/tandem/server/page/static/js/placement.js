// The plan as a picture: what each layer's matrices are, where they are kept, and why.

import { draw, make } from "/page/js/dom.js";
import { size } from "/page/js/metrics.js";

const ROLES = {
  qkv: "attention", q_up: "attention", head_matrices: "attention", attention_out: "attention",
  gate_up: "mlp", down: "mlp", router: "router", gates: "router", experts: "experts",
  embedding: "embedding", head: "embedding",
};
const WIDTH = 920;
const NAME = 280;
const ROW = 30;

/** Return the elements of an `InstanceInfo`'s placement and plan. */
export function drawPlacement(info) {
  const groups = info.placement ?? [];
  const parts = groups.flatMap((group) => group.parts.map((part) => ({ ...part, size_bytes: part.size_bytes * group.num_layers })));
  const devices = [...new Set(parts.map(({ device }) => device))].sort();
  const sums = devices.map((device) => ({ device, bytes: sum(parts.filter((part) => part.device === device)) }));
  return [
    make("p", {}, `${info.architecture}, ${info.num_parameters.toLocaleString("en")} parameters, ${size(info.weight_bytes)} of weights.`),
    sums.length ? make("p", { class: "hint" }, sums.map(({ device, bytes }) => `${device}: ${size(bytes)}`).join(", "), ". Widths below are bytes of one layer.") : null,
    groups.length ? make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Layers by device" }, drawGroups(groups, devices)) : null,
    groups.length ? drawKey() : null,
    make(
      "details",
      {},
      make("summary", {}, "Why so"),
      make(
        "div",
        { class: "scroll", tabindex: "0", role: "group", "aria-label": "Choices and reasons" },
        make(
          "table",
          {},
          make("thead", {}, make("tr", {}, ["What", "Choice", "Why"].map((name) => make("th", { scope: "col" }, name)))),
          make("tbody", {}, info.plan.map(([what, value, why]) => make("tr", {}, make("th", { scope: "row" }, what), make("td", {}, value), make("td", {}, why)))),
        ),
      ),
    ),
  ];
}

function sum(parts) {
  return parts.reduce((bytes, part) => bytes + part.size_bytes, 0);
}

function kindOf({ role }) {
  return ROLES[role] ?? "other";
}

function drawGroups(groups, devices) {
  const widest = Math.max(...groups.flatMap((group) => devices.map((device) => sum(group.parts.filter((part) => part.device === device)))), 1);
  const column = (WIDTH - NAME) / Math.max(devices.length, 1);
  const height = groups.length * ROW + 26;
  const words = groups.map((group) => `${nameOf(group)}: ${group.parts.map((part) => `${part.role} ${size(part.size_bytes)} ${part.weight_format} on ${part.device}`).join(", ")}`);
  const picture = draw("svg", { class: "placement", viewBox: `0 0 ${WIDTH} ${height}`, width: WIDTH, height, role: "img", "aria-label": words.join("; ") });
  devices.forEach((device, i) => picture.append(draw("text", { x: NAME + i * column, y: 14, class: "tick" }, device)));
  groups.forEach((group, row) => {
    const y = 24 + row * ROW;
    picture.append(draw("text", { x: 0, y: y + 15, class: "row-name" }, nameOf(group)));
    devices.forEach((device, i) => {
      let x = NAME + i * column;
      for (const part of group.parts.filter((each) => each.device === device)) {
        const width = Math.max((part.size_bytes / widest) * (column - 16), 1.5);
        const block = draw("rect", { x, y, width, height: 20, class: `part ${kindOf(part)}` });
        block.append(draw("title", {}, `${part.role}: ${size(part.size_bytes)} a layer, ${part.weight_format}, ${device}`));
        picture.append(block);
        x += width;
      }
    });
  });
  return picture;
}

function nameOf({ first, num_layers: count, kind }) {
  if (first < 0) return kind;
  return count === 1 ? `Layer ${first}, ${kind}` : `${first} to ${first + count - 1}, ${kind}`;
}

function drawKey() {
  return make(
    "p",
    { class: "hint legend" },
    ["attention", "mlp", "router", "experts", "embedding", "other"].map((kind) =>
      make("span", { class: "key" }, draw("svg", { width: 10, height: 10, "aria-hidden": "true" }, draw("rect", { width: 10, height: 10, rx: 2, class: `part ${kind}` })), ` ${kind}`),
    ),
  );
}
