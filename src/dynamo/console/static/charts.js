// Charts: lines over time in SVG, with a crosshair for pointer and arrow keys. Colors come from the style sheet.

import { h, replace, svg } from "./dom.js";
import { clock } from "./format.js";

const PAD = { left: 46, right: 10, top: 10, bottom: 20 };

export function sparkline(values, kind = "s1") {
  const known = values.filter((one) => one !== null && one !== undefined);
  const top = Math.max(...known, 1e-9);
  const step = 100 / Math.max(1, values.length - 1);
  const points = values.map((one, place) => (one === null || one === undefined ? null : [place * step, 29 - (one / top) * 27])).filter(Boolean);
  const line = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  return svg("svg", { class: `spark ${kind}`, viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" },
    points.length > 1 ? svg("polygon", { class: "area", points: `${points[0][0]},30 ${line} ${points.at(-1)[0]},30` }) : null,
    points.length > 1 ? svg("polyline", { class: "line", points: line }) : null);
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 4, 5, 8, 10].find((one) => one * unit >= value * 1.02) * unit || 10 * unit;
}

export class LineChart {
  // `series`: [{label, kind, value: (item) => number|null, step?: bool, area?: bool, dashed?: bool, optional?: bool}]; items have `at` in seconds.
  constructor(title, series, options = {}) {
    this.series = this.declared = series;
    this.options = { format: String, height: 190, gap: 5, ...options };
    this.items = [];
    this.focus = null;
    this.canvas = h("div", { class: "canvas", tabindex: "0", role: "img", "aria-label": title });
    this.legend = h("div", { class: "legend", "aria-live": "off" });
    this.title = title;
    this.node = h("section", { class: "card chart", "aria-label": title },
      h("div", { class: "head" }, h("h2", {}, title), this.legend), h("div", { class: "body" }, this.canvas));
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.mark(null));
    this.canvas.addEventListener("blur", () => this.mark(null));
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  // Series with `optional` are left out while they have no values.
  update(items) {
    this.items = items;
    this.series = this.declared.filter((one) => !one.optional || items.some((item) => (one.value(item) ?? null) !== null));
    this.draw();
  }

  point(x) {
    if (!this.items.length || !this.scale) return;
    const at = this.scale.time(x);
    let best = 0;
    this.items.forEach((one, place) => { if (Math.abs(one.at - at) < Math.abs(this.items[best].at - at)) best = place; });
    this.mark(best);
  }

  press(event) {
    const last = this.items.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    const from = this.focus ?? last;
    this.mark(Math.min(last, Math.max(0, from + moves[event.key])));
    this.canvas.setAttribute("aria-label", `${this.title}, ${this.describe(this.items[this.focus])}`);
  }

  mark(place) {
    this.focus = place;
    this.draw();
  }

  describe(item) {
    const parts = this.series.map((one) => `${one.label} ${this.options.format(one.value(item))}`);
    return `${clock(item.at)}: ${parts.join(", ")}`;
  }

  draw() {
    const width = this.canvas.clientWidth, height = this.options.height;
    const shown = this.items[this.focus ?? this.items.length - 1];
    replace(this.legend, this.focus !== null && shown ? h("span", { class: "when" }, clock(shown.at)) : null,
      this.series.map((one) => h("span", { class: `item ${one.kind}` }, h("i", { "aria-hidden": "true" }), `${one.label} `,
        h("b", {}, shown ? this.options.format(one.value(shown)) : "–"))));
    if (!width) return;
    const items = this.items;
    if (!items.length) {
      replace(this.canvas, h("p", { class: "waiting muted" }, this.options.waiting || "Waiting for samples"));
      return;
    }
    const end = items.at(-1).at, begin = Math.min(items[0].at, end - (this.options.span ?? 30));
    const values = items.flatMap((item) => this.series.map((one) => one.value(item)).filter((one) => one !== null && one !== undefined));
    const top = niceTop(Math.max(...values, this.options.least || 0));
    const inner = width - PAD.left - PAD.right, tall = height - PAD.top - PAD.bottom;
    const x = (at) => PAD.left + ((at - begin) / (end - begin)) * inner;
    const y = (value) => PAD.top + tall - (value / top) * tall;
    this.scale = { time: (place) => begin + ((place - PAD.left) / inner) * (end - begin) };
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      parts.push(svg("line", { class: "grid-line", x1: PAD.left, x2: width - PAD.right, y1: y(top * share), y2: y(top * share) }));
      parts.push(svg("text", { class: "tick", x: PAD.left - 7, y: y(top * share) + 4, "text-anchor": "end" }, this.options.format(top * share).replace(/\.0+(?=\D|$)/, "")));
    }
    for (const share of width > 420 ? [0, 0.5, 1] : [0, 1]) {
      const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
      parts.push(svg("text", { class: "tick", x: x(begin + (end - begin) * share), y: height - 4, "text-anchor": anchor }, clock(begin + (end - begin) * share)));
    }
    for (const one of this.series) parts.push(...this.lines(one, x, y));
    if (this.focus !== null && shown) {
      parts.push(svg("line", { class: "cross", x1: x(shown.at), x2: x(shown.at), y1: PAD.top, y2: PAD.top + tall }));
      for (const one of this.series) {
        const value = one.value(shown);
        if (value !== null && value !== undefined) parts.push(svg("circle", { class: `mark ${one.kind}`, cx: x(shown.at), cy: y(value), r: 3.5 }));
      }
    }
    replace(this.canvas, svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, parts));
    if (this.focus === null) this.canvas.setAttribute("aria-label", `${this.title}, ${this.describe(items.at(-1))}. Arrow keys move through time.`);
  }

  // A pause between samples interrupts the line.
  lines(one, x, y) {
    const found = [];
    let run = [], last = null;
    const close = () => {
      if (!run.length) return;
      const points = run.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" ");
      if (one.area && run.length > 1) found.push(svg("polygon", { class: `area ${one.kind}`, points: `${run[0][0]},${y(0)} ${points} ${run.at(-1)[0]},${y(0)}` }));
      if (run.length > 1) found.push(svg("polyline", { class: `line ${one.kind}${one.dashed ? " dashed" : ""}`, points }));
      else found.push(svg("circle", { class: `mark ${one.kind}`, cx: run[0][0], cy: run[0][1], r: 2 }));
      run = [];
    };
    for (const item of this.items) {
      const value = one.value(item);
      const known = value !== null && value !== undefined;
      if (!known || (last !== null && item.at - last > this.options.gap)) close();
      if (known) {
        if (one.step && run.length) run.push([x(item.at), run.at(-1)[1]]);
        run.push([x(item.at), y(value)]);
      }
      last = item.at;
    }
    close();
    return found;
  }
}
