// The Prometheus page as numbers, and what follows from two readings of it.

/** Parse the text format; returns a map from name to `[{labels, value}]`. */
export function parseMetrics(text) {
  const found = new Map();
  const line = /^([\w:]+)(?:\{(.*)\})? (\S+)$/gm;
  for (let match; (match = line.exec(text)); ) {
    const [, name, labels, value] = match;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels: parseLabels(labels), value: Number(value.replace("+Inf", "Infinity")) });
  }
  return found;
}

function parseLabels(text) {
  const labels = {};
  for (const [, name, value] of (text ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
    labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
  }
  return labels;
}

/** Return the sum of a metric over all labels; null if it is not there. */
export function total(found, name) {
  const samples = found.get(`tandem:${name}`);
  return samples ? samples.reduce((sum, { value }) => sum + value, 0) : null;
}

/** Return a histogram as `[{le, count}]`, counts not accumulated; empty if it is not there. */
export function buckets(found, name) {
  const sums = new Map();
  for (const { labels, value } of found.get(`tandem:${name}_bucket`) ?? []) {
    const le = Number(labels.le.replace("+Inf", "Infinity"));
    sums.set(le, (sums.get(le) ?? 0) + value);
  }
  let before = 0;
  return [...sums].sort(([a], [b]) => a - b).map(([le, value]) => {
    const count = value - before;
    before = value;
    return { le, count };
  });
}

/** Take an earlier histogram from a later one; a server that restarted begins anew. */
export function since(later, earlier) {
  if (later.length !== earlier.length) return later;
  const rest = later.map(({ le, count }, i) => ({ le, count: count - earlier[i].count }));
  return rest.some(({ count }) => count < 0) ? later : rest;
}

/** Return the bound below which a share of a histogram lies, linear within a bucket; null: empty. */
export function quantile(histogram, share) {
  const all = histogram.reduce((sum, { count }) => sum + count, 0);
  if (!all) return null;
  let before = 0;
  let lower = 0;
  for (const { le, count } of histogram) {
    if (before + count >= share * all) {
      if (le === Infinity) return lower;
      return lower + (le - lower) * ((share * all - before) / count);
    }
    before += count;
    lower = le;
  }
  return lower;
}

/** Return bytes with a unit. */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "unknown";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) [bytes, at] = [bytes / 1024, at + 1];
  return `${bytes >= 100 || at === 0 ? bytes.toFixed(0) : bytes.toFixed(1)} ${units[at]}`;
}
