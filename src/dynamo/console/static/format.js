// Numbers, durations and times as text.

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size >= 10000 ? COMPACT.format(value) : size >= 100 ? WHOLE.format(value) : COUNT.format(value);
}

export function whole(value) {
  return value === null || value === undefined ? "–" : WHOLE.format(value);
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 60000) return `${(value / 60000).toFixed(1)} min`;
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 1 : 2)} s`;
  return value >= 100 ? `${value.toFixed(0)} ms` : value >= 10 ? `${value.toFixed(1)} ms` : `${value.toFixed(2)} ms`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;
}

export function bytes(value) {
  return value >= 1 << 20 ? `${(value / (1 << 20)).toFixed(1)} MB` : value >= 1024 ? `${(value / 1024).toFixed(0)} KB` : `${value} B`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

export function ago(seconds) {
  const age = Math.max(0, Date.now() / 1000 - seconds);
  return age < 1.5 ? "now" : `${duration(age)} ago`;
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} d`;
}

// Worker ids are 64-bit numbers in hexadecimal; the last digits distinguish them.
export function shortId(id) {
  return id && id.length > 8 ? `…${id.slice(-6)}` : id || "–";
}
