// Lines over time and bars of a distribution, with their last values in words for those who cannot
// see them.

import uPlot from "/page/vendor/uplot.mjs";
import { draw, make, show } from "/page/js/dom.js";

const HEIGHT = 170;
// Steps of an axis of counts: a fraction of a block would be written as the block before it.
const WHOLE_STEPS = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A chart of series over time; `series` is `[{name, colour, fill}]`, `whole` says that values are counts. */
export class TimeChart {
  constructor(place, { title, series, format, top = null, whole = false }) {
    this.place = place;
    this.options = { title, series, format, top, whole };
    this.data = [[], ...series.map(() => [])];
    this.words = make("p", { class: "hint legend" });
    this.canvas = make("div", { class: "chart", role: "img", "aria-label": title });
    place.append(this.canvas, this.words);
    this.plot = null;
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  /** Add one moment; the oldest of many go. */
  push(at, values, keep) {
    this.data[0].push(at);
    values.forEach((value, i) => this.data[i + 1].push(value));
    while (this.data[0].length > keep) this.data.forEach((column) => column.shift());
    this.refresh();
  }

  refresh() {
    const { title, series, format } = this.options;
    const last = series.map(({ name }, i) => ({ name, value: this.data[i + 1].at(-1) }));
    const words = last.map(({ name, value }) => `${name} ${value === null || value === undefined ? "none" : format(value)}`);
    this.canvas.setAttribute("aria-label", `${title}: ${words.join(", ")}`);
    show(
      this.words,
      last.map(({ name }, i) =>
        make("span", { class: "key" }, draw("svg", { width: 10, height: 10, "aria-hidden": "true" }, draw("rect", { width: 10, height: 10, rx: 2, class: `swatch ${series[i].colour}` })), ` ${words[i]}`),
      ),
    );
    if (!this.canvas.clientWidth) return;
    if (this.plot) this.plot.setData(this.data);
    else this.build();
  }

  /** Make the plot anew: another theme has other colours. */
  build() {
    this.plot?.destroy();
    if (!this.canvas.clientWidth) return;
    const { series, format, top, whole } = this.options;
    const axis = { stroke: colourOf("muted"), grid: { stroke: colourOf("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    this.plot = new uPlot(
      {
        width: this.canvas.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { show: false },
        scales: { y: { range: (_, __, high) => [0, top ?? Math.max(high * 1.15, 1)] } },
        axes: [
          { ...axis, size: 28, space: 70, values: (_, ticks) => ticks.map((tick) => (this.data[0].length < 2 ? "" : new Date(tick * 1000).toLocaleTimeString("en-GB"))) },
          { ...axis, size: 58, values: (_, ticks) => ticks.map(format), ...(whole ? { incrs: WHOLE_STEPS } : {}) },
        ],
        series: [
          {},
          ...series.map(({ colour, fill }) => ({
            stroke: colourOf(colour), width: 2, points: { show: false }, fill: fill ? colourOf(`${colour}-soft`) : undefined,
          })),
        ],
      },
      this.data,
      this.canvas,
    );
  }

  resize() {
    if (this.plot && this.canvas.clientWidth) this.plot.setSize({ width: this.canvas.clientWidth, height: HEIGHT });
    else this.refresh();
  }
}

const BAR = 22;
const FEWEST_BARS = 9;

/** Return the bars of a histogram `[{le, count}]`; `label` writes a bound. */
export function drawBars(histogram, label, title) {
  const used = trim(histogram);
  const most = Math.max(...used.map(({ count }) => count), 1);
  const all = used.reduce((sum, { count }) => sum + count, 0);
  const width = Math.max(used.length * BAR, 220);
  const step = width / Math.max(used.length, 1);
  const picture = draw("svg", { class: "bars", viewBox: `0 0 ${width} 122`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}, ${all} in all` });
  used.forEach(({ le, count }, i) => {
    const height = (count / most) * 100;
    const bar = draw("rect", { x: i * step + 1.5, y: 102 - height, width: step - 3, height: Math.max(height, count ? 2 : 0), rx: 2, class: "bar-of" });
    bar.append(draw("title", {}, `${count} up to ${le === Infinity ? "any time" : label(le)}`));
    picture.append(bar);
  });
  const ends = make("p", { class: "hint ends" }, make("span", {}, used.length ? `up to ${label(used[0].le)}` : ""), make("span", {}, used.length > 1 ? lastBound(used, label) : ""));
  return [picture, ends];
}

function lastBound(used, label) {
  const { le } = used.at(-1);
  return le === Infinity ? `over ${label(used.at(-2).le)}` : `up to ${label(le)}`;
}

function trim(histogram) {
  let first = histogram.findIndex(({ count }) => count > 0);
  if (first < 0) return [];
  let end = histogram.findLastIndex(({ count }) => count > 0) + 1;
  // Some empty room on both sides, so that one bar is not as wide as the card.
  for (const fewest = Math.min(FEWEST_BARS, histogram.length); end - first < fewest; ) {
    if (first > 0) first -= 1;
    if (end < histogram.length && end - first < fewest) end += 1;
  }
  return histogram.slice(first, end);
}
